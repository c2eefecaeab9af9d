"""The statement is one for in-toto's own classes, and says of SLSA's fields what the specification wants to read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import Parse, ParseDict
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from packageurl import PackageURL

from quantmint.pipeline.publish.provenance import BUILD_TYPE, encode, statement
from quantmint.pipeline.publish.release import CARD
from tests.publish.lineages import COMMIT, FILES, JUDGED, MANIFEST_OF_LLAMA, OTHER, REPORTED, STARTED, A, B

_URI = re.compile(r"[a-z][a-z0-9+.-]*:[^\s]+")
_LENGTHS = {"sha256": 64, "gitCommit": 40}


@pytest.fixture
def said() -> dict[str, Any]:
    return statement(MANIFEST_OF_LLAMA, FILES)


def dependencies(said: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    return found


def test_in_toto_reads_it(said: dict[str, Any]) -> None:
    """Its parser refuses a field that the formats do not have."""
    parsed = Parse(encode(said), statement_pb2.Statement())
    Statement.copy_from_pb(parsed).validate()
    provenance = ParseDict(said["predicate"], provenance_pb2.Provenance())
    for descriptor in (*provenance.build_definition.resolved_dependencies, *provenance.run_details.byproducts):
        ResourceDescriptor.copy_from_pb(descriptor).validate()
    assert provenance.run_details.metadata.started_on.ToDatetime().isoformat() == STARTED.removesuffix(".000Z")


def test_the_rules_of_the_specification(said: dict[str, Any]) -> None:
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    definition, details = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    assert definition["externalParameters"]
    for uri in (definition["buildType"], details["builder"]["id"]):
        assert _URI.fullmatch(uri)
    for descriptor in (*said["subject"], *dependencies(said), *details["byproducts"]):
        assert {"uri", "digest", "content"} & descriptor.keys(), "one of the three is needed"
        assert "uri" not in descriptor or _URI.fullmatch(descriptor["uri"])
        for name, digest in descriptor.get("digest", {}).items():
            assert re.fullmatch(rf"[0-9a-f]{{{_LENGTHS[name]}}}", digest)
    assert len({subject["name"] for subject in said["subject"]}) == len(said["subject"])


def test_what_it_is_about(said: dict[str, Any]) -> None:
    """Every file that is there before the statement itself, with its digest."""
    subjects = {subject["name"]: subject["digest"] for subject in said["subject"]}
    assert subjects.keys() == {"config.json", "model-00001.safetensors", CARD, "quantmint/gate.json"}
    assert all(digest == {"sha256": FILES[name].sha256} for name, digest in subjects.items())
    assert said["predicate"]["runDetails"]["byproducts"] == [
        {"name": "quantmint/gate.json", "digest": {"sha256": FILES["quantmint/gate.json"].sha256}}
    ]


def test_what_it_was_made_from(said: dict[str, Any]) -> None:
    base = f"hf://org/llama@{COMMIT}"
    chat = f"hf://datasets/org/chat@{COMMIT}"
    questions = "hf://datasets/openai/gsm8k"
    assert dependencies(said) == [
        {"name": "base", "uri": base, "digest": {"gitCommit": COMMIT}},
        {"name": "base/config.json", "uri": f"{base}/config.json", "digest": {"sha256": A}},
        {"name": "base/model.safetensors", "uri": f"{base}/model.safetensors", "digest": {"sha256": B}},
        {"name": "calibration/org/chat", "uri": chat, "digest": {"gitCommit": COMMIT}},
        {"name": "evaluation/tiny_facts", "digest": {"sha256": B}},
        {"name": "evaluation/openai/gsm8k", "uri": f"{questions}@{COMMIT}", "digest": {"gitCommit": COMMIT}},
        {"name": "evaluation/openai/gsm8k", "uri": f"{questions}@{OTHER}", "digest": {"gitCommit": OTHER}},
        {"name": "evaluation/org/unknown", "uri": "hf://datasets/org/unknown"},
        {"name": "serving", "uri": f"oci://rocm/vllm@sha256:{B}", "digest": {"sha256": B}},
        {"name": "Jinja2", "uri": "pkg:pypi/jinja2@3.1.6"},
        {"name": "torch", "uri": "pkg:pypi/torch@2.12.0"},
        {"name": "torch", "uri": "pkg:pypi/torch@2.13.0%2Brocm7.0"},
        {"name": "vllm", "uri": "pkg:pypi/vllm@0.32.0"},
    ]


def test_how_and_when(said: dict[str, Any]) -> None:
    definition, details = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    assert definition["externalParameters"] == {"recipe": MANIFEST_OF_LLAMA.recipe}
    assert definition["internalParameters"]["artefact"] == A
    gate = MANIFEST_OF_LLAMA.stages["gate"]
    assert definition["internalParameters"]["stages"]["gate"] == {"fingerprint": gate.fingerprint, "version": 2}
    assert details["metadata"] == {"invocationId": gate.fingerprint, "startedOn": STARTED, "finishedOn": REPORTED}
    assert details["builder"]["version"] == {"quantmint": "0.1.0"}
    assert JUDGED not in (details["metadata"]["startedOn"], details["metadata"]["finishedOn"])


def test_the_page_that_the_build_type_names() -> None:
    """It is there, and explains every parameter."""
    page = Path(__file__).parents[2] / str(PackageURL.from_string(BUILD_TYPE).subpath)
    text = page.read_text(encoding="utf-8")
    definition = statement(MANIFEST_OF_LLAMA, FILES)["predicate"]["buildDefinition"]
    for name in (*definition["externalParameters"], *definition["internalParameters"], BUILD_TYPE):
        assert f"`{name}`" in text
    example = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    Statement.copy_from_pb(ParseDict(example, statement_pb2.Statement())).validate()
    ParseDict(example["predicate"], provenance_pb2.Provenance())
