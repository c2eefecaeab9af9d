"""Keep checkpoints fresh: due recipes, rounds of runs, schedules and notices."""
