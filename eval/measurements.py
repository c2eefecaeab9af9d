"""Everything that was measured about one candidate, as the gate takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.bench import Launch
from eval.canary import Canary
from eval.errors import MeasurementError
from eval.samples import SampleSet
from eval.servers import Server
from eval.typed import typed
from eval.verdict import Verdict

Both = tuple[SampleSet, SampleSet]
"""The baseline's samples and the candidate's."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What the inspection of the checkpoint's files found: a verdict with one sentence for each reason."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements:
    """Both sides of every measurement.

    `artefact` is the candidate's digest. `samples` maps a task of the suite to its (baseline, candidate) runs,
    `control` to what the baseline answered when some items were asked again. `launches` are those of both sides, in
    the order in which they were made. `weights` are the bytes of the (baseline's, candidate's) tensors, `claims` what
    the guides promise of such a checkpoint (`eval.gate.headlines`). `stopped` names the measurement that ended the
    run: nothing after it was measured. `faults` are sentences about measurements that were tried and broke (the text
    of a `MeasurementError`): each makes the verdict INVALID, with its reason on record.
    """

    artefact: str
    structure: Structure
    baseline: Server
    candidate: Server
    samples: Mapping[str, Both] = field(default_factory=dict)
    control: Mapping[str, SampleSet] = field(default_factory=dict)
    canary: Canary | None = None
    launches: tuple[Launch, ...] = ()
    weights: tuple[int, int] = (0, 0)
    claims: Mapping[str, float] = field(default_factory=dict)
    stopped: str | None = None
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of everything but samples and control, which are kept in files of their own."""
        return {
            "artefact": self.artefact,
            "structure": {"verdict": self.structure.verdict.value, "reasons": list(self.structure.reasons)},
            "servers": {"baseline": self.baseline.to_json(), "candidate": self.candidate.to_json()},
            "canary": None if self.canary is None else self.canary.to_json(),
            "launches": [launch.to_json() for launch in self.launches],
            "weights": list(self.weights),
            "claims": dict(self.claims),
            "stopped": self.stopped,
            "faults": list(self.faults),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], samples: Mapping[str, Both], control: Mapping[str, SampleSet]
    ) -> Measurements:
        """Read back what `to_json` wrote, with what was kept beside it; `MeasurementError` for anything else."""
        try:
            before, after = data["weights"]
            structure = data["structure"]
            proof = {"verdict": Verdict(structure["verdict"]), "reasons": tuple(structure["reasons"])}
            fields = {
                "artefact": str(data["artefact"]),
                "structure": typed(Structure, proof),
                "baseline": Server.from_json(data["servers"]["baseline"]),
                "candidate": Server.from_json(data["servers"]["candidate"]),
                "samples": samples,
                "control": control,
                "canary": None if data["canary"] is None else Canary.from_json(data["canary"]),
                "launches": tuple(Launch.from_json(launch) for launch in data["launches"]),
                "weights": (int(before), int(after)),
                "claims": {name: float(factor) for name, factor in data["claims"].items()},
                "stopped": data["stopped"],
                "faults": tuple(data["faults"]),
            }
            return typed(cls, fields)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise MeasurementError(f"not the measurements of a candidate: {error!r}") from error
