"""Everything that was measured about one candidate, as the gate takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eval.bench import Launch
from eval.canary import Canary
from eval.errors import MeasurementError
from eval.records import Record
from eval.samples import SampleSet
from eval.servers import Server
from eval.verdict import Verdict

Both = tuple[SampleSet, SampleSet]
"""The baseline's samples and the candidate's."""


@dataclass(frozen=True, slots=True)
class Structure(Record):
    """What the inspection of the checkpoint's files found: a verdict with one sentence for each reason."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements(Record):
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
            "structure": self.structure.to_json(),
            "servers": {"baseline": self.baseline.to_json(), "candidate": self.candidate.to_json()},
            "canary": None if self.canary is None else self.canary.to_json(),
            "launches": [launch.to_json() for launch in self.launches],
            "weights": list(self.weights),
            "claims": dict(self.claims),
            "stopped": self.stopped,
            "faults": list(self.faults),
        }

    @classmethod
    def read(
        cls, data: Mapping[str, Any], samples: Mapping[str, Both], control: Mapping[str, SampleSet]
    ) -> Measurements:
        """Read back what `to_json` wrote, with what was kept beside it; `MeasurementError` for anything else."""
        try:
            sides = {side: data["servers"][side] for side in ("baseline", "candidate")}
            flat = {name: value for name, value in data.items() if name not in ("servers", "samples", "control")}
        except (AttributeError, KeyError, TypeError) as error:
            raise MeasurementError(f"not the measurements of a candidate: {error!r}") from error
        return replace(cls.from_json({**flat, **sides}), samples=samples, control=control)
