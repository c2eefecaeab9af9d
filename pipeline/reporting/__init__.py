"""What a report shows of a checkpoint's files and of a run."""
