"""The machine that serves: what it is, and whether it is ready."""
