"""What keeps checkpoints fresh: what is due, a fleet of runs, schedules and notices."""
