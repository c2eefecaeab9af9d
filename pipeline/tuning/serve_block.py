"""The section of a recipe that a sweep recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from pipeline.tuning.space import TUNABLEOP, Point, Value


class ServeBlock(NamedTuple):
    """The section as values and as the YAML to paste, which begins with ``serve:``."""

    section: dict[str, Any]
    text: str


def serve_block(point: Point, existing: Mapping[str, Any], tunableop: str | None) -> ServeBlock:
    """What ``existing`` (the recipe's own section) becomes with a point's changes.

    ``tunableop`` is the path to the tuned kernels; it is named where the point uses them.
    """
    knobs = {**existing.get("knobs", {}), **{knob: _written(value) for knob, value in point if knob != TUNABLEOP}}
    section = {**existing, "knobs": knobs}
    if tunableop is not None and any(knob == TUNABLEOP for knob, _ in point):
        section["tunableop"] = tunableop
    text = yaml.safe_dump({"serve": section}, sort_keys=False, allow_unicode=True, width=10_000)
    return ServeBlock(section, text)


def _written(value: Value) -> Value | int:
    """Whole numbers without quotes, the way people write them."""
    return int(value) if isinstance(value, str) and value.isdecimal() and str(int(value)) == value else value
