"""The engines that are other people's libraries: run in a process of their own, read back, not taken at their word."""
