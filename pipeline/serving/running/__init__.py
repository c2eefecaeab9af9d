"""A server that runs: its process, its ports, its log, and what the log says."""
