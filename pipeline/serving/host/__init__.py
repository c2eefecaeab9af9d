"""Detect the accelerators of this machine and check whether it is ready to serve."""
