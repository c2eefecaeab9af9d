"""A dataclass from JSON, every value of the type that its field declares: a record may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def typed(kind: type[T], data: Mapping[str, Any]) -> T:
    """`kind(**data)`, where tuples and dataclasses among the values are made already.

    A number must be finite: NaN compares as neither within a limit nor beyond it. Raises `TypeError` where a field is
    missing or unknown, `ValueError` where a value is of another type.
    """
    made = kind(**data)
    for name, hint in get_type_hints(kind).items():
        value = getattr(made, name)
        if not _fits(value, hint):
            expected = f", expected {' or '.join(get_args(hint))}" if get_origin(hint) is Literal else ""
            raise ValueError(f"{name} {value!r}{expected}")
    return made


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple and isinstance(value, tuple):
        if inner[-1] is Ellipsis:
            return all(_fits(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if kind is Mapping and isinstance(value, Mapping):
        return all(_fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items())
    if hint is float:
        return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
    return _is_int(value) if hint is int else isinstance(value, kind or hint) and kind is None


def _is_int(value: Any) -> bool:
    """Whether a whole number, of a size that a float holds."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000
