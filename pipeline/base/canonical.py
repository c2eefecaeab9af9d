"""The canonical JSON of a value, and its fingerprint: equal values give equal bytes.

::

    fingerprint({"stage": "quantize", "version": 3, "recipe": {"scheme": "ptpc-fp8"}})   # 64 hex digits

An unstable fingerprint would repeat hours of work, or take another result for this one. So the encoder refuses values
without a stable form (sets, paths, bytes, NaN, objects) and names their path. ``1``, ``1.0`` and ``True`` differ, as
they do for a kernel. Strings are not normalized: a tokenizer sees the difference, and Unicode's tables change between
versions of Python.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from quantmint.pipeline.base.errors import StageError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class UnstableValueError(StageError):
    """A value in a fingerprint has no stable form; the message names its place (``$.recipe.gate.margin``) and type."""


class _Absent:
    """The type of `ABSENT`, the value of a side of a difference that has nothing at the path."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


@dataclass(frozen=True)
class JsonDifference:
    """A path at which two payloads differ; ``ABSENT`` is the value of a side that lacks it."""

    path: str
    old: Json | _Absent
    new: Json | _Absent


def plain(value: object) -> Json:
    """Return a copy of a value that has only JSON's types: dict, list, str, int, float, bool and None.

    Raises `UnstableValueError`, as `canonical_json` does.
    """
    try:
        return _plain(value, "$")
    except RecursionError:
        raise UnstableValueError("a value is nested too deep: does it contain itself?") from None


def canonical_json(value: object) -> bytes:
    """Return a value as UTF-8 JSON with sorted keys, no blanks and the shortest digits of each float.

    Raises `UnstableValueError` for NaN, infinities, -0.0, lone surrogates, keys that are not strings, sets, paths,
    bytes and other objects. Enums, tuples and mappings become their JSON counterparts.
    """
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def fingerprint(value: object) -> str:
    """Return the full SHA-256 (64 hex digits) of `canonical_json`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def difference(old: object, new: object) -> list[JsonDifference]:
    """Return the paths at which two payloads differ, in the order of their keys.

    Lists are compared by index. A subtree that only one side has is one difference.
    """
    changes: list[JsonDifference] = []
    _compare(plain(old), plain(new), "$", changes)
    return changes


def _plain(value: object, path: str) -> Json:
    if isinstance(value, Enum):
        return _plain(value.value, path)
    if value is None or isinstance(value, bool):
        return value
    # The methods of the base class: a subclass may print itself otherwise, and its value is all that counts.
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float) and math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0):
        return float.__float__(value)
    if isinstance(value, str):
        text = str.__str__(value)
        if text.isascii() or text.encode(errors="replace").decode() == text:  # no half of a character
            return text
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        keys = {str(_plain(key, path)): item for key, item in value.items()}
        return {key: _plain(item, _below(path, key)) for key, item in keys.items()}
    shown = f" ({value!r})" if isinstance(value, str | float) else ""
    raise UnstableValueError(f"{path} is a {type(value).__qualname__}{shown}, which has no stable form")


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{json.dumps(key, ensure_ascii=False)}]"


def _compare(old: Json, new: Json, path: str, changes: list[JsonDifference]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            place = _below(path, key)
            if key not in new:
                changes.append(JsonDifference(place, old[key], ABSENT))
            elif key not in old:
                changes.append(JsonDifference(place, ABSENT, new[key]))
            else:
                _compare(old[key], new[key], place, changes)
    elif isinstance(old, list) and isinstance(new, list):
        shared = min(len(old), len(new))
        for index in range(shared):
            _compare(old[index], new[index], f"{path}[{index}]", changes)
        changes += [JsonDifference(f"{path}[{shared + n}]", item, ABSENT) for n, item in enumerate(old[shared:])]
        changes += [JsonDifference(f"{path}[{shared + n}]", ABSENT, item) for n, item in enumerate(new[shared:])]
    elif type(old) is not type(new) or old != new:  # the type as well: 1 == 1.0 == True
        changes.append(JsonDifference(path, old, new))
