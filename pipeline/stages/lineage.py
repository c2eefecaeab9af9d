"""Where a checkpoint comes from, as the records of its stages say: model, data, tools, devices.

`quantmint.json`, the statement and the bill of materials are three readings of this, so that none can say what another
does not. Nothing is asked of the machine: the same entries give the same lineage anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from eval import record
from eval.errors import MeasurementError
from eval.measurements import Server
from pipeline.base.canonical import fingerprint
from pipeline.base.errors import StageError
from pipeline.publish.manifest import Base, Dataset, Hardware, Made, Serving
from pipeline.publish.provenance import ABSENT, Lineage
from pipeline.stages.gate import GATE
from pipeline.stages.source import LOCATION
from pipeline.store.entries import Entry
from pipeline.store.toolchain import recorded_environment


def gather(entries: Mapping[str, Entry], recipe: str) -> Lineage:
    """Read the lineage from a run's entries, by the keys of their stages; ``recipe`` is `LoadedRecipe.text_proven`.

    Raises `StageError` where the gate's record cannot be read.
    """
    resolved = yaml.safe_load(recipe)
    server = _candidate(entries["gate"])
    return Lineage(
        recipe=resolved,
        artefact=str(entries["gate"].record.result["artefact"]),
        base=_base(entries["source"]),
        stages={key: _made(entry) for key, entry in sorted(entries.items())},
        datasets=tuple(dict.fromkeys((*_calibrated(entries, resolved), *_evaluated(entries)))),
        tools=_tools(entries),
        serving=Serving(engine=server.engine, image=server.image),
        hardware=Hardware(
            quantized_on=_text(entries["quantize"].record.result.get("hardware")),
            measured_on=server.device,
            target=str(resolved["target"]["hardware"]),
        ),
        environments={
            key: found for key, entry in sorted(entries.items()) if (found := recorded_environment(entry)) is not None
        },
    )


def _candidate(gate: Entry) -> Server:
    try:
        return record.read(gate.file(GATE))[0].candidate
    except MeasurementError as error:
        raise StageError(f"the gate's record cannot be read: {error}") from error


def _made(entry: Entry) -> Made:
    found = entry.record
    return Made(
        fingerprint=entry.fingerprint,
        version=int(str(found.stage_version)),
        started=found.started,
        finished=found.finished,
        tools=found.tools,
        payload=found.payload,
    )


def _base(source: Entry) -> Base:
    """What the stage `source` was given; of where it lies only the files' names and digests are taken."""
    settings = source.record.payload["settings"]
    named = settings if isinstance(settings, dict) else {}
    files = json.loads(source.file(LOCATION).read_text(encoding="utf-8"))["files"]
    return Base(
        repo=_text(named.get("repo")),
        commit=_text(named.get("commit")),
        sha256=_text(named.get("sha256")),
        files={name: facts["sha256"] for name, facts in sorted(files.items())},
    )


def _calibrated(entries: Mapping[str, Entry], recipe: Mapping[str, Any]) -> Iterator[Dataset]:
    """The calibration set, of our own calibration or of that of a library, as the fingerprint has it."""
    section: Any = None
    if "calibrate" in entries:
        section = entries["calibrate"].record.payload["settings"]
    else:
        settings: Any = entries["quantize"].record.payload["settings"]
        section = settings.get("calibration")
    if not section:
        return
    given = section["set"]
    if given["repo"] is not None:
        yield Dataset("calibration", given["repo"], given["revision"], None)
    else:
        name = str(recipe["calibration"]["set"])
        yield Dataset(
            "calibration", name.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml"), None, given["file"]
        )


def _evaluated(entries: Mapping[str, Entry]) -> Iterator[Dataset]:
    """The tasks' data: of the Hub at the commits that were fetched, or files of ours; and the canary's prompts."""
    for key in ("evaluate-baseline", "evaluate-candidate"):
        if key not in entries:
            continue
        payload: Any = entries[key].record.payload["settings"]
        for task in payload["tasks"]:
            if task["files"]:
                data = {name: digest for name, digest in task["files"].items() if not name.endswith(".yaml")}
                one = next(iter(data.values())) if len(data) == 1 else fingerprint(task["files"])
                yield Dataset("evaluation", task["task"], None, one)
        fetched: Any = entries[key].record.result["datasets"]
        for _, datasets in sorted(fetched.items()):
            for found in datasets:
                yield Dataset("evaluation", found["path"], found["commit"], None)
    if "canary-baseline" in entries:
        asked: Any = entries["canary-baseline"].record.payload["settings"]
        yield Dataset("evaluation", "canary prompts", None, asked["prompts"])


def _tools(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Versions by tool; those of stages that were made at different times stand side by side."""
    found: dict[str, set[str]] = {}
    for entry in entries.values():
        for name, version in entry.record.tools.items():
            if version != ABSENT:
                found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
