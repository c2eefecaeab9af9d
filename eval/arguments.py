"""Hold the arguments of a function call against the function's JSON Schema, for the part of JSON Schema that tools use.

    >>> schema = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}}, "required": ["days"]}
    >>> violation({"days": 12}, schema)
    'days: 12 is above 9'

A schema with another keyword is refused (`unread_keyword`), because a rule that is not read would pass everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int, float),
    "number": (int, float),
}
_RULES = frozenset(
    [
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "multipleOf",
        "minLength",
        "maxLength",
    ]
)
_WORDS = frozenset({"title", "description", "default", "examples", "$schema"})


def unread_keyword(schema: Any) -> str | None:
    """Return a sentence on the first part of a schema that `violation` cannot hold arguments against, else None."""
    if not isinstance(schema, Mapping):
        return f"found {schema!r:.60}, expected a mapping"
    for key, value in schema.items():
        if key not in _RULES | _WORDS:
            return f"found the keyword {key!r}, expected one of {', '.join(sorted(_RULES))}"
        if key == "type" and not (isinstance(value, str) and value in _TYPES):
            return f"found type {value!r}, expected one of {', '.join(_TYPES)}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return f"found properties {properties!r:.60}, expected a mapping"
    nested = [*properties.values(), *([schema["items"]] if "items" in schema else [])]
    if isinstance(schema.get("additionalProperties"), Mapping):
        nested.append(schema["additionalProperties"])
    return next((fault for fault in map(unread_keyword, nested) if fault is not None), None)


def violation(value: Any, schema: Mapping[str, Any], at: str = "") -> str | None:
    """Return a sentence on the first rule of a schema that a value breaks, None where it breaks none.

    ``at`` is the place of the value in the arguments, with dots.
    """
    return next(_violations(value, schema, at), None)


def _violations(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    place = f"{at}: " if at else ""
    kind = schema.get("type")
    if kind is not None and not _is_of(value, kind):
        yield f"{place}{value!r:.60} is no {kind}"
        return
    if "enum" in schema and not any(equal(value, option) for option in schema["enum"]):
        yield f"{place}{value!r:.60} is none of {', '.join(map(str, schema['enum']))}"
    if "const" in schema and not equal(value, schema["const"]):
        yield f"{place}{value!r:.60} is not {schema['const']!r}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, at)
    elif isinstance(value, list):
        for number, element in enumerate(value):
            yield from _violations(element, schema.get("items", {}), f"{at}[{number}]")
        yield from _length(place, len(value), schema, "Items")
    elif isinstance(value, str):
        yield from _length(place, len(value), schema, "Length")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _of_number(place, value, schema)


def _of_object(value: Mapping[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    properties, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}: {name} is missing" if at else f"{name} is missing"
    for name, element in value.items():
        below = f"{at}.{name}" if at else name
        if name in properties:
            yield from _violations(element, properties[name], below)
        elif further is False:
            yield f"{below} is no argument"
        elif isinstance(further, Mapping):
            yield from _violations(element, further, below)


def _of_number(place: str, value: float, schema: Mapping[str, Any]) -> Iterator[str]:
    if value < schema.get("minimum", -math.inf):
        yield f"{place}{value} is below {schema['minimum']}"
    if value > schema.get("maximum", math.inf):
        yield f"{place}{value} is above {schema['maximum']}"
    if "multipleOf" in schema:
        steps = value / schema["multipleOf"]
        if not math.isclose(steps, round(steps), rel_tol=1e-9, abs_tol=1e-9):
            yield f"{place}{value} is no multiple of {schema['multipleOf']}"


def _length(place: str, length: int, schema: Mapping[str, Any], noun: str) -> Iterator[str]:
    if length < schema.get(f"min{noun}", 0):
        yield f"{place}{length} are fewer than {schema[f'min{noun}']}"
    if length > schema.get(f"max{noun}", math.inf):
        yield f"{place}{length} are more than {schema[f'max{noun}']}"


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def equal(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal: 2 and 2.0 are, 1 and true are not."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)
