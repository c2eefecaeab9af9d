"""Versions of vLLM as numbers that compare."""

from __future__ import annotations

import re

from pipeline.errors import UserError


def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a vLLM version: "0.32.0+cpu" is (0, 32, 0). UserError for a text that starts with none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise UserError(f"{text!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in found[1].split("."))
