"""Versions of vLLM as numbers that compare."""

from __future__ import annotations

import re
from typing import TypeAlias

from pipeline.errors import UserError

Version: TypeAlias = tuple[int, ...]


def parse_version(text: str) -> Version:
    """Release numbers of a vLLM version: "0.32.0+cpu" is (0, 32, 0). UserError for a text that starts with none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise UserError(f"{text!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in found[1].split("."))


def within(version: Version, first: Version, end: Version) -> bool:
    """Whether first <= version < end, with an empty bound open; 0.11 and 0.11.0 are one version."""
    number = trimmed(version)
    return trimmed(first) <= number and (not end or number < trimmed(end))


def trimmed(version: Version) -> Version:
    """A version without the zeros at its end."""
    numbers = list(version)
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
