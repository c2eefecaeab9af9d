"""The errors of `calibration`; its callers translate them into their own."""

from __future__ import annotations

from collections.abc import Sequence


class CalibrationError(Exception):
    """Raised where a calibration set cannot be read, or a model cannot be measured; the message says why."""


class NotReplayableError(CalibrationError):
    """Raised where a model's layers cannot be run one at a time; the message is the reason, without a subject.

    ``skipped`` are the names of layers that the model does not run on text alone.
    """

    def __init__(self, reason: str, skipped: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.skipped = tuple(skipped)
