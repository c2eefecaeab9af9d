"""What every room may use: errors, progress, canonical JSON, child processes, the tables of schemes and hardware."""
