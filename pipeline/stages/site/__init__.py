"""A static index of all runs: what each recipe came to, how that moved from run to run, and the reports themselves."""
