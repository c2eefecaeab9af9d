"""Whether the bill of materials lists the tools that the stages recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.publish.release import SBOM
from pipeline.verify.check import Check, fails, judged
from pipeline.verify.subject import Subject

NAME = "sbom"


def check(subject: Subject) -> Check:
    """Read the CycloneDX document and look every recorded tool up in it."""
    data = subject.object(SBOM)
    if data.get("bomFormat") != "CycloneDX" or not isinstance(data.get("components"), list):
        return fails(NAME, f"{SBOM} is no CycloneDX document")
    listed = {(entry.get("name"), entry.get("version")) for entry in data["components"] if isinstance(entry, dict)}
    faults = [
        f"{SBOM} does not list {tool} {version}, which quantmint.json names"
        for tool, versions in subject.known.tools.items()
        for version in versions.split(", ")
        if (_name(tool), version) not in listed
    ]
    faults += _model(subject, data)
    return judged(NAME, faults, f"{len(listed)} components, every recorded tool among them")


def _model(subject: Subject, data: Mapping[str, Any]) -> Iterator[str]:
    """Files of the model that the document says other digests of."""
    for entry in data["metadata"]["component"].get("components", ()):
        found = {content["content"] for content in entry["hashes"] if content["alg"] == "SHA-256"}
        here = subject.known.files.get(entry["name"])
        if here is None or found != {here.sha256}:
            yield f"{SBOM} speaks of another {entry['name']} than quantmint.json"


def _name(distribution: str) -> str:
    """A distribution's name as the document spells it."""
    return distribution.lower().replace("_", "-")
