"""One checkpoint of a comparison, as its report tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from eval.accuracy import Accuracy
from eval.errors import MeasurementError
from eval.gate import GateReport
from eval.record import read as read_record
from eval.samples import SampleSet

Place = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Contender:
    """A checkpoint with its judgement.

    `baseline` identifies the 16-bit model that it was judged against. `size` is the bytes of the weights (baseline,
    candidate). `answers` maps a task to the candidate's samples, `kv_tokens` is the median over launches of the
    tokens that the KV cache held (baseline, candidate): empty and None where the gate's record is not at hand, which
    `unread` then explains. `paced` are the cells that offer requests at a fixed rate: their tokens per second are the
    arrivals', and no measure of speed.
    """

    name: str
    model: str
    baseline: str
    scheme: str
    created: str
    gate: GateReport
    size: tuple[int, int]
    answers: Mapping[str, SampleSet] = field(default_factory=dict)
    kv_tokens: tuple[int, int] | None = None
    paced: frozenset[str] = frozenset()
    unread: str | None = None

    @property
    def size_ratio(self) -> float:
        """Bytes of the candidate's weights over the baseline's."""
        return self.size[1] / self.size[0]

    @property
    def place(self) -> Place:
        """Where it was measured: (hardware, device, what answered). Throughputs of two places are not compared."""
        return self.gate.hardware, self.gate.device, self.gate.runtime.partition(",")[0].strip()

    def accuracy(self, task: str, metric: str) -> Accuracy | None:
        """Its result on a task by a metric; None where it was not asked."""
        return next((r for r in self.gate.accuracy if (r.task, r.metric) == (task, metric)), None)


def read(report: Path, record: Path | None) -> Contender:
    """Read a `report.json`, with the `gate.json` of the same judgement where there is one.

    Raises `MeasurementError` that names what the report lacks. A record that cannot be read, or that is of another
    judgement, costs only the direct comparison: `Contender.unread` says why.
    """
    try:
        data = json.loads(report.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasurementError(f"{report}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MeasurementError(f"{report}: not JSON: {error}") from error
    contender = from_report(data, report)
    return contender if record is None else _with_record(contender, record)


def from_report(data: Any, origin: Path) -> Contender:
    """Take from a report what a comparison needs; raises `MeasurementError` that names the missing part."""

    def part(mapping: Any, path: str, kind: type | tuple[type, ...]) -> Any:
        for key in path.split("."):
            mapping = mapping.get(key) if isinstance(mapping, dict) else None
        if not isinstance(mapping, kind) or isinstance(mapping, bool):
            found = "nothing" if mapping is None else type(mapping).__name__
            raise MeasurementError(f"{origin}: not a report of this version: {found} at {path}")
        return mapping

    sizes = (part(data, "size.baseline_bytes", int), part(data, "size.candidate_bytes", int))
    if min(sizes) <= 0:
        raise MeasurementError(f"{origin}: sizes of {sizes[0]} and {sizes[1]} bytes cannot be compared")
    try:
        gate = GateReport.from_json(part(data, "gate", dict))
    except (MeasurementError, KeyError, TypeError, ValueError) as error:
        raise MeasurementError(f"{origin}: not a report of this version: its gate: {error}") from error
    return Contender(
        name=part(data, "name", str),
        model=part(data, "model", str),
        baseline=part(data, "digests.source", str),
        scheme=part(data, "scheme", str),
        created=part(data, "created", str),
        gate=gate,
        size=sizes,
        paced=frozenset(c.cell for c in gate.throughput if c.promise is None and gate.policy.min_ratio is not None),
        unread="its gate.json is not at hand",
    )


def _with_record(contender: Contender, path: Path) -> Contender:
    try:
        measurements, report = read_record(path)
    except MeasurementError as error:
        return replace(contender, unread=str(error))
    if report.to_json() != contender.gate.to_json():
        return replace(contender, unread=f"{path} is of another judgement than the report")
    counts = [
        [launch.kv_tokens for launch in measurements.launches if launch.side == side and launch.kv_tokens is not None]
        for side in ("baseline", "candidate")
    ]
    cells = [cell for launch in measurements.launches for cell in launch.cells.values()]
    return replace(
        contender,
        paced=frozenset(cell.cell for cell in cells if cell.request_rate is not None),
        answers={task: candidate for task, (_, candidate) in measurements.samples.items()},
        kv_tokens=(round(median(counts[0])), round(median(counts[1]))) if all(counts) else None,
        unread=None,
    )
