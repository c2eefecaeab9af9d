"""The stages of quantmint and what they share."""

__version__ = "0.3.0"
