"""What `calibration` raises: its callers translate it into their own errors."""

from __future__ import annotations


class CalibrationError(Exception):
    """A calibration set cannot be read, or a model cannot be measured on it; the message says why."""
