"""Structural proof that a checkpoint is what its configuration says."""
