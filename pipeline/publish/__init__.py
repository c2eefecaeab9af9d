"""Where a checkpoint that passed goes."""
