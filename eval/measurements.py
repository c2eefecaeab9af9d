"""Everything that was measured about one candidate, as the gate takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.bench import CellResult
from eval.samples import SampleSet
from eval.servers import Server
from eval.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Structure:
    """What the inspection of the checkpoint's files found: a verdict with one sentence for each reason."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements:
    """Both sides of every measurement.

    `artefact` is the candidate's digest. `samples` maps a task of the suite to its (baseline, candidate) runs,
    `cells` a cell's name to its (baseline, candidate) launches. `faults` are sentences about measurements that were
    tried and broke (the text of a `MeasurementError`): each makes the verdict INVALID, with its reason on record.
    """

    artefact: str
    structure: Structure
    baseline: Server
    candidate: Server
    samples: Mapping[str, tuple[SampleSet, SampleSet]]
    cells: Mapping[str, tuple[tuple[CellResult, ...], tuple[CellResult, ...]]]
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of everything but the samples, which are kept in files of their own."""
        return {
            "artefact": self.artefact,
            "structure": {"verdict": self.structure.verdict.value, "reasons": list(self.structure.reasons)},
            "servers": {"baseline": self.baseline.to_json(), "candidate": self.candidate.to_json()},
            "cells": {
                name: {"baseline": [r.to_json() for r in before], "candidate": [r.to_json() for r in after]}
                for name, (before, after) in self.cells.items()
            },
            "faults": list(self.faults),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], samples: Mapping[str, tuple[SampleSet, SampleSet]]) -> Measurements:
        """Read back what `to_json` wrote, with the samples that were kept beside it."""
        return cls(
            artefact=str(data["artefact"]),
            structure=Structure(Verdict(data["structure"]["verdict"]), tuple(data["structure"]["reasons"])),
            baseline=Server.from_json(data["servers"]["baseline"]),
            candidate=Server.from_json(data["servers"]["candidate"]),
            samples=samples,
            cells={
                name: (
                    tuple(CellResult.from_json(r) for r in sides["baseline"]),
                    tuple(CellResult.from_json(r) for r in sides["candidate"]),
                )
                for name, sides in data["cells"].items()
            },
            faults=tuple(data["faults"]),
        )
