"""The report of one checkpoint: a self-contained HTML page, with the same content as JSON."""
