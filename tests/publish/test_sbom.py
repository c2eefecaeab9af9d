"""The bill of materials is one by CycloneDX's own schema, and lists what the stages ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.publish.provenance import sbom
from tests.publish.lineages import CHECKPOINT, ENVIRONMENTS, JUDGED, MANIFEST_OF_LLAMA, A

ROOT = Path(__file__).parents[2]


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sbom(MANIFEST_OF_LLAMA, ENVIRONMENTS, CHECKPOINT))
    return found


@pytest.fixture(scope="module")
def validator() -> Any:
    from abnf.grammars.rfc3987 import Rule
    from abnf.parser import ParseError
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from jsonschema import Draft7Validator

    # jsonschema checks most formats by itself; this one it leaves out where its own extra is not installed.
    @Draft7Validator.FORMAT_CHECKER.checks("iri-reference", raises=ParseError)
    def is_iri_reference(found: object) -> bool:
        if isinstance(found, str):
            Rule("IRI-reference").parse_all(found)
        return True

    return JsonStrictValidator(SchemaVersion.V1_6)


def test_the_schema_takes_it(document: dict[str, Any], validator: Any) -> None:
    assert validator.validate_str(json.dumps(document)) is None
    wrong = {"more": 1}, {"serialNumber": "urn:uuid:1"}, {"externalReferences": [{"type": "other", "url": "a b"}]}
    for one in (*wrong, {"metadata": {**document["metadata"], "timestamp": "today"}}):
        assert validator.validate_str(json.dumps({**document, **one})) is not None, "the validator would not notice"
    linked = {"externalReferences": [{"type": "other", "url": "https://[::1]/a?b#c"}]}
    assert validator.validate_str(json.dumps({**document, **linked})) is None


def test_what_was_made(document: dict[str, Any]) -> None:
    model = document["metadata"]["component"]
    assert (model["type"], model["name"], model["description"]) == (
        "machine-learning-model",
        "llama-ptpc",
        "Llama in FP8",
    )
    assert model["properties"] == [{"name": "quantmint:artefact", "value": A}]
    assert {file["name"]: file["hashes"] for file in model["components"]} == {
        name: [{"alg": "SHA-256", "content": file.sha256}] for name, file in CHECKPOINT.items()
    }


def test_what_the_stages_ran_on(document: dict[str, Any]) -> None:
    """A version that two stages share is one component, two versions are two; a licence is what somebody knew of it."""
    assert [
        (one["name"], one["version"], one["properties"][0]["value"], licence(one)) for one in document["components"]
    ] == [
        ("aiohttp", "3.14", "serve-candidate", "Apache-2.0 AND MIT"),
        ("certifi", "2026.1", "quantize", None),
        ("jinja2", "3.1.6", "report", None),
        ("numpy", "2.3.0", "quantize serve-candidate", "BSD License"),
        ("torch", "2.12.0", "serve-candidate", "BSD-3-Clause"),
        ("torch", "2.13.0+rocm7.0", "quantize", "BSD-3-Clause"),
        ("vllm", "0.32.0", "serve-candidate", None),
        ("python", "3.11.9", "quantize", "PSF-2.0"),
        ("python", "3.12.1", "serve-candidate", "PSF-2.0"),
    ]


def licence(component: dict[str, Any]) -> str | None:
    for found in component.get("licenses", []):
        told: str = found.get("expression") or found["license"].get("id") or found["license"]["name"]
        return told
    return None


def test_no_clock_and_no_chance(document: dict[str, Any], tmp_path: Path) -> None:
    """Another process, folder, time zone and order of hashes write the same bytes."""
    assert document["metadata"]["timestamp"].startswith(JUDGED.removesuffix("Z"))
    code = (
        "import sys; from quantmint.pipeline.publish.provenance import sbom; from tests.publish.lineages import *;"
        "sys.stdout.buffer.write(sbom(MANIFEST_OF_LLAMA, ENVIRONMENTS, dict(reversed(CHECKPOINT.items()))))"
    )
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        assert done.stdout == sbom(MANIFEST_OF_LLAMA, ENVIRONMENTS, CHECKPOINT)
