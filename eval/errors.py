"""The errors of `eval`; its callers translate them into their own."""

from __future__ import annotations


class MeasurementError(Exception):
    """A measurement is missing, incomplete or not comparable; the message says which and why."""


class DefinitionError(Exception):
    """A suite, task or workload file is wrong; the message names the file and the field."""
