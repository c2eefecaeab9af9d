"""The judgement of a candidate: PASS, FAIL, INCONCLUSIVE or INVALID, with every reason in a sentence.

    report = judge(measurements, Policy.for_suite(suite, margin=0.01, min_ratio=1.0))
    report.verdict, [finding.reason for finding in report.findings]

Accuracy is a test of non-inferiority per gated task: PASS where the lower bound of the difference is above -margin,
FAIL where the upper bound is below -margin, INCONCLUSIVE between. All gated tasks must pass (an intersection-union
test), so several tasks need no correction: each alone keeps the risk of a false PASS at 1 - confidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eval import accuracy, servers, throughput
from eval.accuracy import Accuracy
from eval.errors import MeasurementError
from eval.measurements import Measurements
from eval.power import items_needed
from eval.samples import pair
from eval.suites import Suite
from eval.throughput import Throughput
from eval.verdict import Verdict

Kind = Literal["validity", "accuracy", "throughput", "structure"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a recipe promises.

    `margins` maps each gated task to the loss in accuracy that is accepted, as a fraction (0.01 is one point); tasks
    that are not in it are shown only. `expected_flip_rate` stands in where no item flipped. `min_ratio` is the least
    output throughput relative to the baseline in every cell (None: throughput is shown only), backed by at least
    `launches` launches a side. `baseline_score` maps a task to the score that the baseline is known to reach, give or
    take `baseline_tolerance`.
    """

    margins: Mapping[str, float]
    confidence: float = 0.95
    power: float = 0.8
    expected_flip_rate: float = 0.04
    min_ratio: float | None = None
    launches: int = 1
    baseline_score: Mapping[str, float] = field(default_factory=dict)
    baseline_tolerance: float = 0.03

    @classmethod
    def for_suite(
        cls,
        suite: Suite,
        *,
        margin: float,
        confidence: float = 0.95,
        power: float = 0.8,
        min_ratio: float | None = None,
        launches: int = 1,
        baseline_score: Mapping[str, float] | None = None,
        baseline_tolerance: float = 0.03,
    ) -> Policy:
        """The policy of a recipe on a suite: its margin for each gated task that has none of its own."""
        gated = [task for task in suite.tasks if task.gated]
        return cls(
            margins={task.task: task.margin or margin for task in gated},
            confidence=confidence,
            power=power,
            expected_flip_rate=max(task.expected_flip_rate for task in gated),
            min_ratio=min_ratio,
            launches=launches,
            baseline_score=dict(baseline_score or {}),
            baseline_tolerance=baseline_tolerance,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Read back what `to_json` wrote."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was checked (a task, a cell, a side), how it ended, why."""

    kind: Kind
    subject: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict with all that led to it."""

    artefact: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    accuracy: tuple[Accuracy, ...]
    throughput: tuple[Throughput, ...]
    policy: Policy

    def verdict_of(self, kind: Kind, subject: str | None = None) -> Verdict | None:
        """Verdict of one kind of check, or of one subject in it; None where nothing of it was judged."""
        found = [f.verdict for f in self.findings if f.kind == kind and subject in (None, f.subject)]
        return Verdict.combine(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {
            "artefact": self.artefact,
            "verdict": self.verdict.value,
            "findings": [{**asdict(f), "verdict": f.verdict.value} for f in self.findings],
            "accuracy": [a.to_json() for a in self.accuracy],
            "throughput": [t.to_json() for t in self.throughput],
            "policy": self.policy.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateReport:
        """Read back what `to_json` wrote."""
        return cls(
            artefact=str(data["artefact"]),
            verdict=Verdict(data["verdict"]),
            findings=tuple(Finding(**{**f, "verdict": Verdict(f["verdict"])}) for f in data["findings"]),
            accuracy=tuple(Accuracy.from_json(a) for a in data["accuracy"]),
            throughput=tuple(Throughput.from_json(t) for t in data["throughput"]),
            policy=Policy.from_json(data["policy"]),
        )


def judge(measurements: Measurements, policy: Policy) -> GateReport:
    """Judge a candidate by its measurements; never raises on bad measurements, which are INVALID with their reason."""
    findings = list(_validity(measurements))
    compared: list[Accuracy] = []
    for task, (baseline, candidate) in measurements.samples.items():
        try:
            compared.append(accuracy.compare(pair(baseline, candidate), policy.confidence))
        except MeasurementError as error:
            findings.append(Finding("validity", task, Verdict.INVALID, _sentence(str(error))))
    cells: list[Throughput] = []
    for cell, (before, after) in measurements.cells.items():
        try:
            cells.append(throughput.compare(before, after))
        except MeasurementError as error:
            findings.append(Finding("validity", cell, Verdict.INVALID, _sentence(str(error))))
    findings += _floors(compared, policy)
    findings += _accuracy(compared, measurements, policy)
    findings += _throughput(cells, measurements, policy)
    structure = measurements.structure
    for reason in structure.reasons or ("The files are complete and as the scheme says.",):
        findings.append(Finding("structure", "checkpoint", structure.verdict, _sentence(reason)))
    return GateReport(
        artefact=measurements.artefact,
        verdict=Verdict.combine(finding.verdict for finding in findings),
        findings=tuple(findings),
        accuracy=tuple(compared),
        throughput=tuple(cells),
        policy=policy,
    )


def _validity(measurements: Measurements) -> Iterable[Finding]:
    for fault in measurements.faults:
        yield Finding("validity", "measurement", Verdict.INVALID, _sentence(fault))
    for difference in servers.differences(measurements.baseline, measurements.candidate):
        yield Finding("validity", "servers", Verdict.INVALID, _sentence(difference))
    for side, server in (("baseline", measurements.baseline), ("candidate", measurements.candidate)):
        for line in server.faults:
            yield Finding("validity", side, Verdict.INVALID, _sentence(f"The {side}'s server log says: {line}"))


def _floors(compared: Iterable[Accuracy], policy: Policy) -> Iterable[Finding]:
    for result in compared:
        known = policy.baseline_score.get(result.task)
        if known is not None and abs(result.baseline - known) > policy.baseline_tolerance:
            reason = (
                f"The baseline scores {result.baseline:.2%} on {result.task}, not the {known:.2%} that this model is "
                "known to reach, so something other than quantization is wrong."
            )
            yield Finding("validity", result.task, Verdict.INVALID, reason)


def _accuracy(compared: Iterable[Accuracy], measurements: Measurements, policy: Policy) -> Iterable[Finding]:
    results = {result.task: result for result in compared}
    for task, margin in policy.margins.items():
        if task not in measurements.samples:
            yield Finding("accuracy", task, Verdict.INVALID, f"{task} decides, but was not measured.")
        elif task in results:
            yield _non_inferiority(results[task], margin, policy)


def _non_inferiority(result: Accuracy, margin: float, policy: Policy) -> Finding:
    points = f"{100 * result.difference:+.2f} points on {result.task} ({result.items} items)"
    limit = f"the margin of {100 * margin:.2f} points at {policy.confidence:.0%} confidence"
    if result.lower > -margin:
        reason = f"{points}; the true change is above {100 * result.lower:+.2f} points, within {limit}."
        return Finding("accuracy", result.task, Verdict.PASS, reason)
    if result.upper < -margin:
        reason = f"{points}; the true change is below {100 * result.upper:+.2f} points, outside {limit}."
        return Finding("accuracy", result.task, Verdict.FAIL, reason)
    reason = (
        f"{points}; the true change may lie between {100 * result.lower:+.2f} and {100 * result.upper:+.2f} points, on "
        f"both sides of {limit}. {_more(result, margin, policy)}"
    )
    return Finding("accuracy", result.task, Verdict.INCONCLUSIVE, reason)


def _more(result: Accuracy, margin: float, policy: Policy) -> str:
    flip_rate = result.flip_rate or policy.expected_flip_rate
    try:
        needed = items_needed(margin, flip_rate, policy.confidence, policy.power, result.difference)
    except ValueError:
        return "The change lies on the margin, where no number of items decides."
    if needed <= result.items:
        return "A few more items would decide."
    return f"About {needed - result.items} more items would decide, if the change stays as it is."


def _throughput(cells: Iterable[Throughput], measurements: Measurements, policy: Policy) -> Iterable[Finding]:
    if policy.min_ratio is None:
        return
    if not measurements.cells:
        yield Finding("throughput", "all cells", Verdict.INVALID, "Throughput decides, but was not measured.")
    for cell in cells:
        before, after = cell.launches
        plural = "launch" if before == 1 else "launches"
        backing = f"{before} {plural} a side" if before == after else f"{before} against {after} launches"
        ratio = f"{cell.ratio:.3f} times the baseline's output tokens/s in {cell.cell} ({backing})"
        if min(cell.launches) < policy.launches:
            reason = f"{ratio}; {policy.launches} launches a side are needed to decide."
            yield Finding("throughput", cell.cell, Verdict.INCONCLUSIVE, reason)
        elif cell.ratio >= policy.min_ratio:
            yield Finding("throughput", cell.cell, Verdict.PASS, f"{ratio}, at least {policy.min_ratio:.3f}.")
        else:
            yield Finding("throughput", cell.cell, Verdict.FAIL, f"{ratio}, less than {policy.min_ratio:.3f}.")


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
