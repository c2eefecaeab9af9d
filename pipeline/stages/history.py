"""Find the earlier verdicts on a model: in the store, and in the releases at the recipe's destinations.

Each record of the gate carries those that were known to it, so that a verdict is not lost with its entry.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from quantmint.eval import record
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import GateReport
from quantmint.eval.history import EarlierVerdict, JudgedTask, newest
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.addresses import recipe_destinations
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.publish.release import EVIDENCE
from quantmint.pipeline.recipe.quantization import AUTO
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.entries import FINGERPRINT
from quantmint.pipeline.store.tree import Store

RELEASES: Final = 10
"""Releases of a destination that are read, the newest."""


@dataclass(frozen=True, slots=True)
class Model:
    """The checkpoint to judge, as earlier verdicts are matched with it.

    ``artefact`` is its digest, ``source`` the fingerprint of its `source` entry, ``kinds`` the kind of each task.
    """

    artefact: str
    source: str
    schemes: Collection[str]
    kinds: Mapping[str, str]

    def is_subject(self, artefact: str, source: str, schemes: Collection[str]) -> bool:
        """Return whether a verdict on these counts: same weights, or same source and a scheme in common."""
        return artefact == self.artefact or (source == self.source and not set(self.schemes).isdisjoint(schemes))


def earlier_verdicts(job: Job, model: Model) -> tuple[EarlierVerdict, ...]:
    """Return the verdicts on a model in the store and in the recipe's destinations, by their times.

    Of a destination the newest `RELEASES` releases count. A destination that cannot be read gives a warning.
    """
    verdicts = list(_in_store(job.setting.store, model))
    for destination in recipe_destinations(job.setting.recipe, job.setting.home):
        try:
            verdicts += _released(destination, model)
        except (QuantmintError, MeasurementError, ValueError, KeyError) as error:
            job.progress.warn(f"{destination.address}: earlier verdicts of its releases cannot be read: {error}")
    return newest(verdicts)


def _in_store(store: Store, model: Model) -> Iterator[EarlierVerdict]:
    folder = store.root / "gate"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in filter(FINGERPRINT.fullmatch, names):
        entry = store.find("gate", name)
        if entry is None:
            continue
        result: Any = entry.record.result
        inputs = entry.record.inputs
        schemes = result.get("schemes") or _schemes_in(store, inputs.get("quantize", ""))
        if not model.is_subject(str(result["artefact"]), inputs.get("source", ""), schemes):
            continue
        try:
            report = record.read_report(entry.path / record.NAME)
        except MeasurementError:
            continue  # of a schema that this version does not read
        yield from report.history
        yield _earlier(report, entry.record.finished, schemes, model.kinds)


def _schemes_in(store: Store, fingerprint: str) -> list[str]:
    """Return the schemes of the checkpoint with this quantize fingerprint; empty where the store does not have it."""
    entry = store.find("quantize", fingerprint) if FINGERPRINT.fullmatch(fingerprint) else None
    settings: Any = {} if entry is None else entry.record.payload["settings"]
    return _schemes_of(settings)


def _schemes_of(section: Mapping[str, Any]) -> list[str]:
    overridden = [override.get("scheme") for override in section.get("overrides") or ()]
    return sorted({str(name) for name in (section.get("scheme"), *overridden) if name is not None} - {AUTO})


def _released(destination: Destination, model: Model) -> Iterator[EarlierVerdict]:
    for release in destination.releases()[:RELEASES]:
        manifest = manifests.decode(destination.manifest_of(release))
        schemes = _schemes_of(manifest.recipe["quantization"])
        if not model.is_subject(manifest.artefact, manifest.stages["source"].fingerprint, schemes):
            continue
        raw = destination.read(release, f"{EVIDENCE}/{record.NAME}")
        if raw is None:
            continue
        report = record.report_of(json.loads(raw))
        yield from report.history
        earlier = _earlier(report, manifest.stages["gate"].finished, schemes, model.kinds)
        yield replace(earlier, release=release.tag)


def _earlier(report: GateReport, judged: str, schemes: Collection[str], kinds: Mapping[str, str]) -> EarlierVerdict:
    measured = {result.task: result for result in report.accuracy}
    tasks = {
        task: JudgedTask(
            measured[task].kind if task in measured else kinds.get(task, "score"),
            margin,
            measured[task].difference if task in measured else None,
        )
        for task, margin in report.policy.margins.items()
    }
    return EarlierVerdict(
        judged=judged,
        verdict=report.verdict,
        artefact=report.artefact,
        schemes=tuple(sorted(schemes)),
        confidence=report.policy.confidence,
        min_ratio=report.policy.min_ratio,
        tasks=tasks,
    )
