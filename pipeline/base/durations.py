"""Durations as people type and read them."""

from __future__ import annotations

import re

from pipeline.base.errors import UserError

_PART = r"(\d+(?:\.\d+)?)\s*([smhd])"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds of ``90m``, ``2h``, ``1h30m``; UserError for anything else."""
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text.lower()))
    if seconds <= 0 or re.sub(_PART, "", text.lower()).strip():
        raise UserError(f"found the duration {text!r}, expected one like 90m, 2h or 1h30m")
    return seconds


def duration(seconds: float) -> str:
    """A duration for readers: 45 s, 12 min, 1 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
