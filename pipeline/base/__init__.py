"""The ground floor: errors, progress, canonical JSON, child processes, the tables of schemes and hardware."""
