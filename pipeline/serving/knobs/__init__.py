"""The serving knobs: a table with versions, rules, reasons and sources."""
