"""From measurements and a policy to a report.

Accuracy is a test of non-inferiority per gated task: PASS where the lower bound of the difference is above -margin,
FAIL where the upper bound is below -margin, INCONCLUSIVE between. All gated tasks must pass (an intersection-union
test), so several tasks need no correction: each alone keeps the risk of a false PASS at 1 - confidence.
"""

from __future__ import annotations

from collections.abc import Iterable

from eval import accuracy, servers, throughput
from eval.accuracy import Accuracy
from eval.bench import CellResult
from eval.errors import MeasurementError
from eval.gate import headlines
from eval.gate.finding import Finding, sentence
from eval.gate.policy import Policy
from eval.gate.report import GateReport
from eval.measurements import Measurements
from eval.power import items_needed
from eval.samples import pair
from eval.throughput import Throughput
from eval.verdict import Verdict


def judge(measurements: Measurements, policy: Policy) -> GateReport:
    """Judge a candidate by its measurements; never raises on bad measurements, which are INVALID with their reason."""
    findings = list(_validity(measurements))
    compared: list[Accuracy] = []
    for task, (baseline, candidate) in measurements.samples.items():
        try:
            compared.append(accuracy.compare(pair(baseline, candidate), policy.confidence))
        except MeasurementError as error:
            findings.append(Finding("validity", task, Verdict.INVALID, sentence(str(error))))
    cells: list[Throughput] = []
    for cell, (before, after) in _cells(measurements).items():
        try:
            cells.append(throughput.compare(cell, before, after))
        except MeasurementError as error:
            findings.append(Finding("validity", cell, Verdict.INVALID, sentence(str(error))))
    findings += _floors(compared, policy)
    findings += _accuracy(compared, measurements, policy)
    findings += _throughput(cells, measurements, policy)
    structure = measurements.structure
    for reason in structure.reasons or ("The files are complete and as the scheme says.",):
        findings.append(Finding("structure", "checkpoint", structure.verdict, sentence(reason)))
    return GateReport(
        artefact=measurements.artefact,
        verdict=Verdict.combine(finding.verdict for finding in findings),
        findings=tuple(findings),
        accuracy=tuple(compared),
        throughput=tuple(cells),
        policy=policy,
        canary=measurements.canary,
        headlines=tuple(headlines.measure(measurements, cells)),
        runtime=measurements.candidate.runtime,
        hardware=measurements.candidate.hardware,
        device=measurements.candidate.device,
    )


def _validity(measurements: Measurements) -> Iterable[Finding]:
    for fault in measurements.faults:
        yield Finding("validity", "measurement", Verdict.INVALID, sentence(fault))
    for difference in servers.differences(measurements.baseline, measurements.candidate):
        yield Finding("validity", "servers", Verdict.INVALID, sentence(difference))
    for side, server in (("baseline", measurements.baseline), ("candidate", measurements.candidate)):
        for line in server.faults:
            yield Finding("validity", side, Verdict.INVALID, sentence(f"The {side}'s server log says: {line}"))


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
    if not measurements.launches:
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


def _cells(measurements: Measurements) -> dict[str, tuple[list[CellResult], list[CellResult]]]:
    found: dict[str, tuple[list[CellResult], list[CellResult]]] = {}
    for launch in measurements.launches:
        for name, cell in launch.cells.items():
            found.setdefault(name, ([], []))[launch.side == "candidate"].append(cell)
    return found
