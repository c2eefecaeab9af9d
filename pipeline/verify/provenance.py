"""Whether the in-toto statement says of this release what quantmint.json says, file by file and stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.canonical import Change, difference
from pipeline.publish.lineage import Lineage
from pipeline.publish.manifest import Manifest
from pipeline.publish.release import PROVENANCE, File
from pipeline.publish.statement import BUILD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE, statement
from pipeline.verify.check import Check, fails, judged
from pipeline.verify.subject import Subject

NAME = "provenance"
_SHOWN = 5
_ESSENTIAL = ("$.predicate.buildDefinition.externalParameters", "$.predicate.buildDefinition.internalParameters")


def check(subject: Subject) -> Check:
    """Hold the subjects against the files, then the rest against the statement that the manifest stands for."""
    manifest = subject.known
    found = subject.object(PROVENANCE)
    predicate = found.get("predicate")
    kinds = (found.get("_type"), found.get("predicateType"))
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE) or not isinstance(predicate, dict):
        return fails(NAME, f"{PROVENANCE} is no in-toto statement of SLSA provenance v1")
    faults = list(_subjects(subject, found.get("subject")))
    expected = statement(_lineage(manifest), _files(subject), manifest.quantmint)
    other = [change for change in difference(expected, found) if not change.path.startswith("$.subject")]
    definition = predicate.get("buildDefinition")
    known = isinstance(definition, Mapping) and definition.get("buildType") == BUILD_TYPE
    if not known:  # of another build type only what every one has is compared
        other = [change for change in other if change.path.startswith(_ESSENTIAL)]
    faults += [f"{PROVENANCE}: {_told(change)}" for change in other[:_SHOWN]]
    if len(other) > _SHOWN:
        faults.append(f"{PROVENANCE}: {len(other) - _SHOWN} more differences from quantmint.json")
    base = manifest.base
    origin = f"{base.repo}@{base.commit}" if base.repo else f"a folder ({str(base.sha256)[:16]}…)"
    details = () if known else (f"its build type is not {BUILD_TYPE}: only recipe, stages and subjects were compared",)
    return judged(
        NAME, faults, f"from {origin} by {len(manifest.stages)} stages, as quantmint.json says", details=details
    )


def _subjects(subject: Subject, found: object) -> Iterator[str]:
    """Files of which the statement speaks otherwise than they are; each once."""
    if not isinstance(found, list):
        yield f"{PROVENANCE} has no subjects"
        return
    said: dict[str, Any] = {}
    for entry in found:
        name, digest = entry["name"], entry["digest"]["sha256"]
        if name in said:
            yield f"{PROVENANCE} speaks twice of {name}"
        said[name] = digest
    wanted = {name for name in subject.known.files if name != PROVENANCE}
    for name in sorted(said.keys() | wanted):
        if name not in wanted:
            yield f"{PROVENANCE} speaks of {name}, which quantmint.json does not list"
        elif name not in said:
            yield f"{PROVENANCE} does not speak of {name}"
        elif subject.digests.get(name, said[name]) != said[name]:
            yield f"{PROVENANCE} speaks of another {name}: its SHA-256 is not that of the file"


def _lineage(manifest: Manifest) -> Lineage:
    return Lineage(
        recipe=manifest.recipe,
        artefact=manifest.artefact,
        base=manifest.base,
        stages=manifest.stages,
        datasets=manifest.datasets,
        tools=manifest.tools,
        serving=manifest.serving,
        hardware=manifest.hardware,
        environments={},
    )


def _files(subject: Subject) -> dict[str, File]:
    return {
        name: File(subject.folder / name, digest.size, digest.sha256) for name, digest in subject.known.files.items()
    }


def _told(change: Change) -> str:
    return f"{change.path[2:]} is {_short(change.new)}, quantmint.json says {_short(change.old)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
