"""Pydantic's errors as faults: at file:line:column, with what was found, what was expected and the nearest spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.recipe import expectations
from pipeline.recipe.faults import Fault, Place, YamlPath, did_you_mean, nearest, shown
from pipeline.recipe.yaml_positions import Document


def faults_of(error: ValidationError, document: Document) -> list[Fault]:
    """One fault for each error; `document` is the merged recipe that was validated."""
    details = error.errors(include_url=False)
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    # A misspelt key is one fault, not an unknown key with a missing one.
    misspelt = {(*path[:-1], nearest(path[-1], expectations.keys(path[:-1]))) for path in unknown}
    return [
        _fault(detail, document)
        for detail in details
        if not (detail["type"] == "missing" and detail["loc"] in misspelt)
    ]


def place_of(path: YamlPath, document: Document, *, key: bool = False) -> Place:
    """Where a path stands: its value, or its key; for what is absent, the nearest mapping that should hold it."""
    first, second = (document.keys, document.values) if key else (document.values, document.keys)
    if path in first or path in second:
        return first.get(path) or second[path]
    while path and path not in document.keys and path not in document.values:
        path = path[:-1]
    return document.keys.get(path) or document.values[path]


def _fault(detail: ErrorDetails, document: Document) -> Fault:
    path: YamlPath = detail["loc"]
    match detail["type"]:
        case "missing":
            return Fault(place_of(path, document), path, f"found nothing, expected {expectations.phrase(path)}")
        case "extra_forbidden":
            return Fault(place_of(path, document, key=True), path, _unknown(path))
        case "rule":
            return _rule(path, detail.get("ctx", {}), detail["input"], document)
    return Fault(place_of(path, document), path, _mismatch(path, detail["input"]))


def _unknown(path: YamlPath) -> str:
    *parent, key = path
    valid = expectations.keys(tuple(parent))
    hint = did_you_mean(key, valid)
    elsewhere = expectations.places_of(str(key))
    if not hint and not parent and len(elsewhere) == 1:
        hint = f' (did you mean "{elsewhere[0]}"?)'
    return f"found an unknown key, expected one of {', '.join(sorted(valid))}{hint}"


def _rule(path: YamlPath, context: Mapping[str, Any], value: Any, document: Document) -> Fault:
    if context["at"]:
        path = (*path, context["at"])
        value = value[context["at"]]
    found, expected = context["found"] or shown(value), context["expected"]
    hint = did_you_mean(value, (expectations.at(path) or {}).get("enum", ()))
    return Fault(place_of(path, document), path, f"found {found}, expected {expected}{hint}")


def _mismatch(path: YamlPath, value: Any) -> str:
    fragment = expectations.at(path) or {}
    expected = expectations.phrase(path)
    if fragment.get("type") == "string" and isinstance(value, bool | int | float):
        expected += " (put it in quotes)"
    return f"found {shown(value)}, expected {expected}{did_you_mean(value, fragment.get('enum', ()))}"
