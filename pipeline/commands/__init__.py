"""The commands, one a module, each with its click command under the name ``command``."""
