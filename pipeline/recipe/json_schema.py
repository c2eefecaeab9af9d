"""The schema of recipes: as JSON for editors, and as words for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quantmint.pipeline.base.errors import did_you_mean, nearest
from quantmint.pipeline.recipe.faults import Fault, Position, YamlPath, shown
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.yaml_positions import YamlDocument


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file; no key is required, as it may extend another."""
    generated = _unbroken(Recipe.model_json_schema())
    for section in ("Quantization", "Calibration"):
        del generated["$defs"][section]["required"]
    extends = {
        "type": "string",
        "minLength": 1,
        "title": "Extends",
        "description": "File (relative to this one) or recipe that this builds on: mappings merge, all else replaces.",
    }
    properties = generated.pop("properties")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "quantmint recipe",
        "description": generated["description"],
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": properties.pop("name"), "extends": extends, **properties},
        "$defs": generated["$defs"],
    }


def _unbroken(fragment: Any) -> Any:
    """Return a schema with each description, which comes from a docstring, joined to one line."""
    if isinstance(fragment, list):
        return [_unbroken(entry) for entry in fragment]
    if not isinstance(fragment, dict):
        return fragment
    joined = {key: _unbroken(entry) for key, entry in fragment.items()}
    return {key: " ".join(e.split()) if key == "description" and isinstance(e, str) else e for key, e in joined.items()}


def schema_text() -> str:
    """Return the text of `recipes/recipe.schema.json`."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


@cache
def _root() -> dict[str, Any]:
    return Recipe.model_json_schema()


def resolve(fragment: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a fragment refers to; for `X or null` the schema of X."""
    if "anyOf" in fragment:
        fragment = next(option for option in fragment["anyOf"] if option.get("type") != "null")
    if "$ref" in fragment:
        fragment = _root()["$defs"][fragment["$ref"].rpartition("/")[2]]
    return fragment


def at(path: YamlPath) -> dict[str, Any] | None:
    """Return the schema of the value at a path; None where the schema has no such place."""
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
    """Return the keys that the mapping at a path may have, at the top `extends` too."""
    names = list((at(path) or {}).get("properties", ()))
    return names if path else [*names, "extends"]


def places_of(key: str) -> list[str]:
    """Return the dotted names of the fields with this key, anywhere in a recipe."""
    return [name for name in _fields(_root(), "") if name.rpartition(".")[2] == key]


def phrase(path: YamlPath) -> str:
    """Return the values that a path may have in words: "one of fp8, mxfp4", "a whole number of at least 1"."""
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
    limits = [f"{word} {fragment[key]:g}" for key, word in words.items() if key in fragment]
    return f" {', '.join(limits)}" if limits else ""


def _fields(fragment: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in fragment.get("properties", {}).items():
        yield prefix + key
        yield from _fields(resolve(value), f"{prefix}{key}.")


def faults_of(error: ValidationError, document: YamlDocument) -> list[Fault]:
    """Return a fault for each error of pydantic's; `document` is the merged recipe that was validated."""
    details = error.errors(include_url=False)
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    # A misspelt key is one fault, not an unknown key with a missing one.
    misspelt = {(*path[:-1], nearest(path[-1], keys(path[:-1]))) for path in unknown}
    return [
        _fault(detail, document)
        for detail in details
        if not (detail["type"] == "missing" and detail["loc"] in misspelt)
    ]


def place_of(path: YamlPath, document: YamlDocument, *, key: bool = False) -> Position:
    """Return the place of a path's value, or of its key; for an absent path, that of the nearest mapping to hold it."""
    first, second = (document.keys, document.values) if key else (document.values, document.keys)
    if path in first or path in second:
        return first.get(path) or second[path]
    while path and path not in document.keys and path not in document.values:
        path = path[:-1]
    return document.keys.get(path) or document.values[path]


def _fault(detail: ErrorDetails, document: YamlDocument) -> Fault:
    path: YamlPath = detail["loc"]
    match detail["type"]:
        case "missing":
            return Fault(place_of(path, document), path, f"found nothing, expected {phrase(path)}")
        case "extra_forbidden":
            return Fault(place_of(path, document, key=True), path, _unknown(path))
        case "rule":
            return _rule(path, detail.get("ctx", {}), detail["input"], document)
    return Fault(place_of(path, document), path, _mismatch(path, detail["input"]))


def _unknown(path: YamlPath) -> str:
    *parent, key = path
    valid = keys(tuple(parent))
    hint = did_you_mean(key, valid)
    elsewhere = places_of(str(key))
    if not hint and not parent and len(elsewhere) == 1:
        hint = f' (did you mean "{elsewhere[0]}"?)'
    return f"found an unknown key, expected one of {', '.join(sorted(valid))}{hint}"


def _rule(path: YamlPath, context: Mapping[str, Any], value: Any, document: YamlDocument) -> Fault:
    if context["at"]:
        path = (*path, context["at"])
        value = value[context["at"]]
    value_text, expected = context["found"] or shown(value), context["expected"]
    choices = (at(path) or {}).get("enum", ())
    hint = "" if value in choices else did_you_mean(value, choices)
    return Fault(place_of(path, document), path, f"found {value_text}, expected {expected}{hint}")


def _mismatch(path: YamlPath, value: Any) -> str:
    fragment = at(path) or {}
    expected = phrase(path)
    if fragment.get("type") == "string" and isinstance(value, bool | int | float):
        expected += " (put it in quotes)"
    return f"found {shown(value)}, expected {expected}{did_you_mean(value, fragment.get('enum', ()))}"
