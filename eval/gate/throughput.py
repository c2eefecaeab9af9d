"""The verdict on each cell of the workload.

PASS where the lower bound of the ratio reaches the promise: the exact rank test says that the candidate is faster than
so many times the baseline. FAIL where the upper bound is short of it; between lies INCONCLUSIVE. So a candidate that is
exactly as fast as promised is published 5 % of the time at most, whether a gain or "no slower than" is promised. All
cells must pass, so several cells need no correction.

A promise is made for a machine. Measured on another one it is neither kept nor broken, whatever the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantmint.eval import throughput
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.report import Finding, Policy, sentence
from quantmint.eval.measurements import CellResult, Measurements, Side
from quantmint.eval.statistics.ranks import MOST_LOOKS, decided, fewest_launches
from quantmint.eval.throughput import Throughput
from quantmint.eval.verdict import Verdict


def compare(measurements: Measurements, policy: Policy) -> tuple[list[Throughput], list[Finding]]:
    """Compare every measured cell; return the comparisons, and an INVALID finding for each cell without one."""
    compared: list[Throughput] = []
    faults: list[Finding] = []
    for cell in dict.fromkeys(name for launch in measurements.launches for name in launch.cells):
        before, after = (_of(measurements, cell, side) for side in ("baseline", "candidate"))
        promise = None if _offered(before + after) else policy.min_ratio
        looks = policy.launches if ends_early(policy) else None
        reused = sum(launch.reused and cell in launch.cells for launch in measurements.launches)
        try:
            compared.append(
                throughput.compare(
                    cell, before, after, promise, policy.throughput_confidence, reused=reused, looks=looks
                )
            )
        except MeasurementError as error:
            faults.append(Finding.invalid(cell, str(error)))
    return compared, faults


def judge(
    cells: Sequence[Throughput], measurements: Measurements, policy: Policy, *, broken: bool
) -> Iterator[Finding]:
    """Yield a finding for each cell with a promise, or one finding for all cells if no cell can be judged.

    Nothing is yielded if the policy promises no speed, or if the run was stopped and `broken` says that the canary's
    own findings stop the candidate.
    """
    if policy.min_ratio is None or (measurements.stopped is not None and broken):
        return
    if measurements.stopped is not None:
        reason = f"Throughput was not measured: the {measurements.stopped} ended the run by limits that were stricter."
        yield Finding("throughput", "all cells", Verdict.INCONCLUSIVE, reason)
        return
    candidate = measurements.candidate
    if not candidate.measures_speed:
        reason = f"The promise of {policy.min_ratio:.3g} times is open: {candidate.runtime} measures no throughput."
        yield Finding("throughput", "all cells", Verdict.INCONCLUSIVE, reason)
        return
    if not any(launch.cells for launch in measurements.launches):
        yield Finding("throughput", "all cells", Verdict.INVALID, "Throughput decides, but was not measured.")
        return
    judged = [cell for cell in cells if cell.promise is not None]
    if cells and not judged:
        reason = "Every cell offers a fixed rate of requests, which tells latencies but no speed to be judged."
        yield Finding("throughput", "all cells", Verdict.INCONCLUSIVE, reason)
    for cell in judged:
        verdict, reason = _cell(cell, measurements, policy)
        yield Finding("throughput", cell.cell, verdict, sentence(f"{_figures(cell)}; {reason}"))


def _cell(cell: Throughput, measurements: Measurements, policy: Policy) -> tuple[Verdict, str]:
    promise, hardware = cell.promise or 0.0, measurements.candidate.hardware
    looks = early(cell.values_baseline, cell.values_candidate, promise, policy) if ends_early(policy) else None
    if policy.hardware is not None and hardware != policy.hardware:
        device = measurements.candidate.device
        return Verdict.INCONCLUSIVE, f"measured on {device or hardware}, promised for {policy.hardware}"
    if looks is not None:
        verdict, look = looks
        if look is not None:
            word = "more" if verdict is Verdict.PASS else "less"
            return verdict, f"{promise:.3g} was promised, and it is {word}, as {look} launches a side show"
        if min(cell.launches) >= policy.launches:
            most = f"{policy.launches} launches a side show neither that it is more than the promised {promise:.3g}"
            return verdict, f"{most} nor that it is less; a promise a little lower would tell"
    needed = max(policy.launches, fewest_launches(policy.throughput_confidence))
    if min(cell.launches) < needed:
        why = f"at {policy.throughput_confidence:.0%} confidence" if needed > policy.launches else "as the recipe asks"
        return Verdict.INCONCLUSIVE, f"{needed} launches a side are needed to decide {why}"
    alpha = 1 - policy.throughput_confidence + 1e-12  # 1 - 0.95 is a hair below or above 1/20
    assert cell.p_promise is not None  # noqa: S101 - as there is a promise
    assert cell.p_short is not None  # noqa: S101
    if cell.p_promise <= alpha:
        return Verdict.PASS, f"{promise:.3g} was promised, and it is more (p = {cell.p_promise:.2g})"
    if cell.p_short <= alpha:
        return Verdict.FAIL, f"{promise:.3g} was promised, and it is less (p = {cell.p_short:.2g})"
    least = f"whether it is more than the promised {promise:.3g} is not shown (p = {cell.p_promise:.2g})"
    return Verdict.INCONCLUSIVE, f"{least}; more launches, or a promise a little lower, would tell"


def ends_early(policy: Policy) -> bool:
    """Return whether the launches may end at an early look.

    The policy says so, but never for more launches than `MOST_LOOKS`, whose looks cannot be counted out.
    """
    return policy.stop_early and policy.launches <= MOST_LOOKS


def early(
    baseline: Sequence[float], candidate: Sequence[float], promise: float, policy: Policy
) -> tuple[Verdict, int | None]:
    """Return the verdict of a series of launches that may end early, and the number of the look that decided.

    `baseline` and `candidate` are output tokens/s in the order in which the launches were made, `promise` is the
    promised ratio. The result is INCONCLUSIVE and None if no look decided.
    """
    promised, alpha = [promise * value for value in baseline], 1 - policy.throughput_confidence
    above = decided(candidate, promised, policy.launches, alpha)
    below = decided(promised, candidate, policy.launches, alpha)
    if above is not None and (below is None or above < below):
        return Verdict.PASS, above
    return (Verdict.INCONCLUSIVE, None) if below is None else (Verdict.FAIL, below)


def _figures(cell: Throughput) -> str:
    interval = f"{cell.ratio_low:.3f} to {cell.ratio_high:.3f}, " if cell.repeated else ""
    return f"{cell.ratio:.3f} times the baseline's output tokens/s in {cell.cell} ({interval}{cell.backing})"


def _of(measurements: Measurements, cell: str, side: Side) -> list[CellResult]:
    return [launch.cells[cell] for launch in measurements.launches if launch.side == side and cell in launch.cells]


def _offered(results: Sequence[CellResult]) -> bool:
    """Return whether the load arrived at a fixed rate, which then decides the throughput, not the server."""
    return any(result.request_rate is not None for result in results)
