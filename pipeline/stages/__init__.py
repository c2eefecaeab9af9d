"""The stages of a run, one a module."""
