"""What the schema expects at a path, in words.

One source for every "expected ...": the JSON Schema of the models, so that a message can't disagree with what editors
complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pipeline.recipe.faults import YamlPath
from pipeline.recipe.schema import Recipe


@cache
def _root() -> dict[str, Any]:
    return Recipe.model_json_schema()


def resolve(fragment: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference; of `X or null`, take X."""
    if "anyOf" in fragment:
        fragment = next(option for option in fragment["anyOf"] if option.get("type") != "null")
    if "$ref" in fragment:
        fragment = _root()["$defs"][fragment["$ref"].rpartition("/")[2]]
    return fragment


def at(path: YamlPath) -> dict[str, Any] | None:
    """The schema of the value at a path; None where the schema has no such place."""
    fragment: dict[str, Any] | None = _root()
    for part in path:
        if fragment is None:
            return None
        if isinstance(part, int):
            fragment = fragment.get("items")
        else:
            fragment = fragment.get("properties", {}).get(part) or fragment.get("additionalProperties") or None
        fragment = resolve(fragment) if isinstance(fragment, dict) else None
    return fragment


def keys(path: YamlPath) -> list[str]:
    """Keys that the mapping at a path may have."""
    names = list((at(path) or {}).get("properties", ()))
    return names if path else [*names, "extends"]


def places_of(key: str) -> list[str]:
    """Dotted names of the fields with this key, anywhere in a recipe."""
    return [name for name in _fields(_root(), "") if name.rpartition(".")[2] == key]


def phrase(path: YamlPath) -> str:
    """What may stand at a path: "one of fp8, mxfp4", "a whole number of at least 1"."""
    fragment = at(path) or {}
    if "enum" in fragment:
        return f"one of {', '.join(fragment['enum'])}"
    match fragment.get("type"):
        case "string" if "pattern" in fragment:
            return f"text that matches {fragment['pattern'].strip('^$')}"
        case "string":
            return "text"
        case "integer":
            return "a whole number" + _limits(fragment)
        case "number":
            return "a number" + _limits(fragment)
        case "boolean":
            return "true or false"
        case "array":
            return "a list with at least one item" if fragment.get("minItems") else "a list"
        case "object" if "properties" in fragment:
            return f"a mapping with {', '.join(fragment['properties'])}"
        case "object":
            return "a mapping"
        case _:
            return "another value"


def _limits(fragment: dict[str, Any]) -> str:
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}
    found = [f"{word} {fragment[key]:g}" for key, word in words.items() if key in fragment]
    return f" {', '.join(found)}" if found else ""


def _fields(fragment: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in fragment.get("properties", {}).items():
        yield prefix + key
        yield from _fields(resolve(value), f"{prefix}{key}.")
