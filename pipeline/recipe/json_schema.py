"""The recipe's JSON Schema, which editors complete and check by.

    # yaml-language-server: $schema=recipe.schema.json

It differs from the models in what one file may leave out: with `extends`, required fields may come from there.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.recipe.schema import Recipe

#: Sections whose fields can be inherited one by one.
_MERGED = {"Quantization": "quantization", "Calibration": "calibration"}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one recipe file."""
    made = Recipe.model_json_schema()
    definitions = made["$defs"]
    whole: dict[str, Any] = {"required": [field for field in made.pop("required") if field != "name"], "properties": {}}
    for definition, section in _MERGED.items():
        whole["properties"][section] = {"required": definitions[definition].pop("required")}
    whole["properties"]["calibration"] = {
        "if": {"type": "object"},
        "then": whole["properties"]["calibration"],
    }
    for definition in definitions.values():
        definition["description"] = " ".join(definition["description"].split())
    extends = {
        "type": "string",
        "minLength": 1,
        "title": "Extends",
        "description": "File (relative to this one) or recipe that this builds on: mappings merge, all else replaces.",
    }
    properties = made.pop("properties")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "quantmint recipe",
        "description": " ".join(made["description"].split()),
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": properties.pop("name"), "extends": extends, **properties},
        # A file without a name is only there to be extended.
        "if": {"required": ["name"], "not": {"required": ["extends"]}},
        "then": whole,
        "$defs": definitions,
    }


def schema_text() -> str:
    """The schema as it is kept in `recipes/recipe.schema.json`."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
