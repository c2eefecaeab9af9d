"""Checkpoints side by side, in groups that share a baseline: only within one do accuracies have a common zero.

>>> here = ("mi300x", "AMD Instinct MI300X", "vllm")
>>> small, fast, slow = Score(0.97, 0.3, 1.2, here), Score(0.99, 0.5, 1.4, here), Score(0.96, 0.5, 1.4, here)
>>> front([small, fast, slow])    # which of them nothing beats
(True, True, False)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any

from pydantic import Field

from quantmint.eval.accuracy import Accuracy, Direct, compare_all
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import GateReport
from quantmint.eval.measurements import Launch
from quantmint.eval.record import read as read_record
from quantmint.eval.records import Part
from quantmint.eval.samples import SampleSet
from quantmint.eval.throughput import Throughput
from quantmint.eval.verdict import Verdict

Place = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _ComparedSize(Part):
    baseline_bytes: Annotated[int, Field(gt=0)]
    candidate_bytes: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class _Digests(Part):
    source: str


@dataclass(frozen=True, slots=True)
class ComparedReport(Part):
    """The parts of a checkpoint's report that a comparison needs; the fields have the report's names.

    `answers` maps a task to the candidate's samples; it is empty without the gate's record, and `unread` then says why.
    `kv_tokens` maps a side to the tokens that its KV cache held; it is empty if no log says so.
    """

    name: str
    model: str
    scheme: str
    created: str
    digests: _Digests
    size: _ComparedSize
    gate: GateReport
    kv_tokens: Mapping[str, int] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    answers: Mapping[str, SampleSet] = field(default_factory=dict)
    unread: str | None = "its gate.json is not at hand"

    @property
    def baseline(self) -> str:
        """Return the identity of the 16-bit model that it was judged against."""
        return self.digests.source

    @property
    def size_ratio(self) -> float:
        """Return the bytes of the candidate's weights over the bytes of the baseline's."""
        return self.size.candidate_bytes / self.size.baseline_bytes

    @property
    def place(self) -> Place:
        """Return (hardware, device, runtime) of the measurement. Throughputs of two places are not compared."""
        return self.gate.hardware, self.gate.device, self.gate.runtime.partition(",")[0].strip()

    @property
    def paced(self) -> frozenset[str]:
        """Return the names of cells with a fixed rate of requests, whose tokens per second are no measure of speed."""
        cells = (cell for launch in self.launches for cell in launch.cells.values())
        return frozenset(cell.cell for cell in cells if cell.request_rate is not None)

    def accuracy(self, task: str, metric: str) -> Accuracy | None:
        """Return the checkpoint's result on a task by a metric; None if the task was not measured by that metric."""
        return next((r for r in self.gate.accuracy if (r.task, r.metric) == (task, metric)), None)

    def throughput(self, cell: str) -> Throughput | None:
        """Return the checkpoint's result in a cell of a workload; None if the cell was not measured."""
        return next((cell_result for cell_result in self.gate.throughput if cell_result.cell == cell), None)


def read(report: Path, record: Path | None) -> ComparedReport:
    """Read a `report.json`, and the `gate.json` of the same judgement from `record` (None: there is none).

    Raises `MeasurementError` for a report that cannot be read or lacks a part, which it names. A record that cannot be
    read, or that belongs to another judgement, raises nothing: only the direct comparison is lost, and
    `ComparedReport.unread` says why.
    """
    try:
        data = json.loads(report.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasurementError(f"{report}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MeasurementError(f"{report}: not JSON: {error}") from error
    contender = from_report(data, report)
    if record is None:
        return contender
    try:
        measurements, judged = read_record(record)
    except MeasurementError as error:
        return replace(contender, unread=str(error))
    if judged.to_json() != contender.gate.to_json():
        return replace(contender, unread=f"{record} is of another judgement than the report")
    answers = {task: candidate for task, (_, candidate) in measurements.samples.items()}
    return replace(contender, answers=answers, unread=None)


def from_report(data: Any, origin: Path) -> ComparedReport:
    """Return the parts of a parsed report that a comparison needs.

    Raises `MeasurementError`, which names the file `origin` and the missing or wrong part.
    """
    try:
        return ComparedReport.from_json(data)
    except MeasurementError as error:
        reason = str(error).removeprefix(
            f"not a {ComparedReport.__name__}: "
        )  # a name of the code, not of the reader's
        raise MeasurementError(f"{origin}: not a report of this version: {reason}") from error


@dataclass(frozen=True, slots=True)
class Score:
    """The axes of a comparison of checkpoints, and the place where the checkpoint was measured.

    `recovery` is that of the worst task (more is better), `size` is relative to the baseline's (less is better),
    `speed` is relative to the baseline's in the worst cell (more is better; None: not measured).
    """

    recovery: float
    size: float
    speed: float | None
    place: Place


def dominates(score: Score, rival: Score) -> bool:
    """Return whether `score` is nowhere worse than `rival` and somewhere better, in figures that can be compared.

    If only one of them has a speed, or if their speeds come from two places, the speeds cannot be compared and the
    result is False.
    """
    ours = [score.recovery, -score.size]
    theirs = [rival.recovery, -rival.size]
    if score.speed is not None and rival.speed is not None and score.place == rival.place:
        ours.append(score.speed)
        theirs.append(rival.speed)
    elif score.speed is not None or rival.speed is not None:
        return False
    return all(a >= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def front(scores: Sequence[Score | None]) -> tuple[bool, ...]:
    """Return for each score whether no other score dominates it; always False for None, which is no score."""
    measured = [score for score in scores if score is not None]
    return tuple(score is not None and not any(dominates(rival, score) for rival in measured) for score in scores)


@dataclass(frozen=True, slots=True)
class Mark:
    """A contender under its letter, with the recovery of its worst task and the speed of its slowest cell.

    `worst` is the result with the least recovery among the gated tasks that all contenders share, `slowest` the cell
    with the least ratio among those that all contenders at the same place measured; each is None without such a task or
    cell. `on_front` says that no other contender dominates this one.
    """

    letter: str
    contender: ComparedReport
    worst: Accuracy | None
    slowest: Throughput | None
    on_front: bool


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """The contenders that were judged against one baseline.

    `tasks` are the (task, metric) pairs of all contenders; `speeds` maps a place to the cells that were measured there.
    `direct` compares every two contenders by their own answers, and `notes` are sentences about what could not be
    compared.
    """

    model: str
    baseline: str
    marks: tuple[Mark, ...]
    tasks: tuple[tuple[str, str], ...]
    speeds: Mapping[Place, tuple[str, ...]]
    direct: tuple[Direct, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of the page and of the terminal's output. `warnings` are sentences to show before any figure."""

    groups: tuple[ComparedGroup, ...]
    warnings: tuple[str, ...]


def side_by_side(contenders: Sequence[ComparedReport], confidence: float = 0.95) -> Comparison:
    """Return the comparison of the contenders, grouped by baseline and lettered A, B, ... in their order.

    The intervals of the direct differences hold together at `confidence`.
    """
    lettered = [(f"{ascii_uppercase[n % 26]}{n // 26 or ''}", contender) for n, contender in enumerate(contenders)]
    baselines: dict[str, list[tuple[str, ComparedReport]]] = {}
    for name, contender in lettered:
        baselines.setdefault(contender.baseline, []).append((name, contender))
    groups = tuple(_group(members, confidence) for members in baselines.values())
    return Comparison(groups, tuple(_warnings(lettered, groups)))


def _group(members: Sequence[tuple[str, ComparedReport]], confidence: float) -> ComparedGroup:
    contenders = [contender for _, contender in members]
    shared = _shared_tasks(contenders)
    worst = [_worst(contender, shared) for contender in contenders]
    slowest = _slowest(contenders)
    scores = [
        None
        if result is None or result.recovery is None or contender.gate.verdict is Verdict.INVALID
        else Score(result.recovery, contender.size_ratio, cell.ratio if cell else None, contender.place)
        for contender, result, cell in zip(contenders, worst, slowest, strict=True)
    ]
    marks = tuple(
        Mark(name, contender, result, cell, best)
        for (name, contender), result, cell, best in zip(members, worst, slowest, front(scores), strict=True)
    )
    answers = {number: c.answers for number, c in enumerate(contenders) if c.answers}
    return ComparedGroup(
        model=contenders[0].model,
        baseline=contenders[0].baseline,
        marks=marks,
        tasks=tuple(dict.fromkeys((result.task, result.metric) for c in contenders for result in c.gate.accuracy)),
        speeds={
            place: tuple(dict.fromkeys(t.cell for c in contenders if c.place == place for t in c.gate.throughput))
            for place in dict.fromkeys(c.place for c in contenders if c.gate.throughput)
        },
        direct=compare_all(answers, confidence) if len(answers) > 1 else (),
        notes=tuple(_notes(marks, shared)),
    )


def _gated(contender: ComparedReport) -> dict[tuple[str, str], Accuracy]:
    margins = contender.gate.policy.margins
    results = contender.gate.accuracy
    return {(r.task, r.metric): r for r in results if r.task in margins and r.recovery is not None}


def _shared_tasks(contenders: Iterable[ComparedReport]) -> frozenset[tuple[str, str]]:
    """Return the (task, metric) pairs of gated tasks that every contender with any such result has.

    Only these tasks rank the contenders.
    """
    task_sets = [frozenset(tasks) for c in contenders if (tasks := _gated(c))]
    return frozenset.intersection(*task_sets) if task_sets else frozenset()


def _worst(contender: ComparedReport, shared: frozenset[tuple[str, str]]) -> Accuracy | None:
    results = [result for key, result in _gated(contender).items() if key in shared]
    return min(results, key=lambda result: result.recovery or 0.0, default=None)


def _slowest(contenders: Sequence[ComparedReport]) -> list[Throughput | None]:
    """Return for each contender its cell with the least ratio; None without a cell.

    Only cells count that all contenders measured at the same place share, and none with a fixed rate of requests.
    """
    slowest: list[Throughput | None] = []
    for contender in contenders:
        neighbours = [c for c in contenders if c.place == contender.place and c.gate.throughput]
        names = [{cell.cell for cell in c.gate.throughput} - c.paced for c in neighbours]
        shared = set.intersection(*names) if names else set()
        cells = [cell for cell in contender.gate.throughput if cell.cell in shared]
        slowest.append(min(cells, key=lambda cell: cell.ratio, default=None))
    return slowest


def _warnings(lettered: Sequence[tuple[str, ComparedReport]], groups: Sequence[ComparedGroup]) -> Iterable[str]:
    if len(groups) > 1:
        members = [", ".join(mark.letter for mark in group.marks) for group in groups]
        parts = "; ".join(f"{n} against {g.model} ({g.baseline[:20]})" for n, g in zip(members, groups, strict=True))
        yield (
            f"These checkpoints have {len(groups)} different baselines: {parts}. A change from one baseline says "
            "nothing beside a change from another, so each group stands alone."
        )
    places: dict[Place, list[str]] = {}
    for name, contender in lettered:
        places.setdefault(contender.place, []).append(name)
    if len(places) > 1:
        parts = "; ".join(f"{', '.join(names)} on {where(place)}" for place, names in places.items())
        yield (
            f"These were measured in {len(places)} places: {parts}. Throughputs of different hardware or software are "
            "never compared: each place has a table of its own. Kernels that round differently move a few answers too."
        )
    for name, contender in lettered:
        if contender.gate.verdict is Verdict.INVALID:
            yield f"{name} ({contender.name}) is INVALID: its figures are shown, but mean nothing."


def _notes(marks: Sequence[Mark], shared: frozenset[tuple[str, str]]) -> Iterable[str]:
    if not shared and any(mark.contender.gate.accuracy for mark in marks):
        yield "No gated task was asked of all of them, so nothing ranks them by accuracy."
    for mark in marks if len(marks) > 1 else ():
        if mark.contender.unread:
            yield f"{mark.letter} has no part in the direct comparison: {mark.contender.unread}."


def where(place: Place) -> str:
    """Return a place in words: "HARDWARE (DEVICE) by RUNTIME"."""
    hardware, device, engine = place
    return f"{hardware} ({device}) by {engine}" if device else f"{hardware} by {engine}"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON data; in each group the contenders are mapped by their letters."""
    return {
        "warnings": list(comparison.warnings),
        "groups": [
            {
                "model": group.model,
                "baseline": group.baseline,
                "notes": list(group.notes),
                "contenders": {mark.letter: _contender(mark) for mark in group.marks},
                "direct": [_direct(direct, group.marks) for direct in group.direct],
            }
            for group in comparison.groups
        ],
    }


def _direct(direct: Direct, marks: Sequence[Mark]) -> Mapping[str, Any]:
    return {**direct.to_json(), "first": marks[direct.first].letter, "second": marks[direct.second].letter}


def _contender(mark: Mark) -> dict[str, Any]:
    contender = mark.contender
    gate = contender.gate
    return {
        "name": contender.name,
        "scheme": contender.scheme,
        "created": contender.created,
        "artefact": gate.artefact,
        "verdict": gate.verdict.value,
        "reasons": list(gate.reasons),
        "on_front": mark.on_front,
        "hardware": gate.hardware,
        "device": gate.device,
        "runtime": gate.runtime,
        "bytes": {
            "baseline": contender.size.baseline_bytes,
            "candidate": contender.size.candidate_bytes,
            "ratio": contender.size_ratio,
        },
        "worst_task": None if mark.worst is None else mark.worst.task,
        "accuracy": [result.to_json() for result in gate.accuracy],
        "throughput": [cell.to_json() for cell in gate.throughput],
        "canary": None if gate.canary is None else gate.canary.to_json(),
        **({} if gate.kl is None else {"kl": gate.kl.to_json()}),
        "kv_tokens": dict(contender.kv_tokens) or None,
        "headlines": [headline.to_json() for headline in gate.headlines],
    }
