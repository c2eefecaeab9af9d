"""The verdict on each task: is the loss within the margin, at the first look that could tell?

PASS where the lower bound of the difference is above -margin, FAIL where the upper bound is below it, INCONCLUSIVE
where no look decided. The evaluation stopped by the same replay of the same numbers, so both agree on where. All gated
tasks must pass (an intersection-union test), so several tasks need no correction: each alone keeps the risk of a false
PASS at 1 - confidence.

A gain beyond the margin is no PASS: quantization does not teach a model. Something else differs between the sides, so
the comparison is void, ANOMALOUS. Only where the baseline disagrees with itself as often may it be chance:
temperature 0 is not deterministic on a server, where the requests that share a batch decide the order of sums. A
baseline that is quantized itself can lose to a candidate that rounds less: there a gain is a PASS.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantmint.eval import accuracy
from quantmint.eval.accuracy import Accuracy, change, margin_in_units
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.report import ANOMALOUS, Control, Finding, Policy, sentence
from quantmint.eval.measurements import Both, Measurements
from quantmint.eval.power import more_items
from quantmint.eval.samples import SampleSet, pair
from quantmint.eval.statistics.sequential import Look, decide, until
from quantmint.eval.verdict import Verdict

_HOPELESS = 10_000_000
"""Further items beyond which a change is said to lie on the margin: no suite has as many."""


def compare(task: str, measurements: Both, policy: Policy) -> tuple[Accuracy, tuple[Look, ...]]:
    """The comparison of a task at the look that decides, and the looks up to it (none for a task that is shown only).

    Raises `MeasurementError` where the sides cannot be paired.
    """
    pairs = pair(*measurements)
    margin = policy.margins.get(task)
    if margin is None:
        if len(pairs.baseline) != pairs.planned:
            count = f"{len(pairs.baseline)} of {pairs.planned} items"
            raise MeasurementError(f"{task}: {count} were asked, and nothing but a margin could end it early")
        return accuracy.compare(pairs, policy.confidence), ()
    looks = decide(pairs, margin_in_units(pairs.kind, margin), policy.confidence)
    judged = until(pairs, len(looks) - 1)
    return accuracy.compare(judged, policy.confidence, bound_confidence=looks[-1].bound_confidence), looks


def judge(
    result: Accuracy,
    looks: tuple[Look, ...],
    floor: Control | None,
    policy: Policy,
    *,
    planned_looks: int,
    baseline_rounding: str | None = None,
) -> Finding:
    """Return the finding of a gated task, from what `compare` found and the baseline's own flips.

    ``baseline_rounding``: see `Measurements`.
    """
    task = result.task
    margin = margin_in_units(result.kind, policy.margins[task])
    promised = policy.margins[task]
    size = f"{promised:.2%}" if result.kind == "perplexity" else f"{100 * promised:.2f} points"
    limit = f"the margin of {size} at {policy.confidence:.0%} confidence"
    no_worse, no_better = _beyond(result, result.lower, better=True), _beyond(result, result.upper, better=False)
    is_gain = result.lower > margin and (floor is None or result.flip_rate > floor.high)
    if is_gain and baseline_rounding is None:
        reason = (
            f"{_change(result)}; the true change is {no_worse}, a gain of more than {limit}. Quantization does not "
            f"improve a model, so something else differs between the sides.{_flips(result, floor)}"
        )
        return Finding("accuracy", task, Verdict.INVALID, reason, ANOMALOUS)
    match looks[-1].decision:
        case "PASS":
            verdict, where = Verdict.PASS, f"the true change is {no_worse}, within {limit}"
        case "FAIL":
            verdict, where = Verdict.FAIL, f"the true change is {no_better}, outside {limit}"
        case _:
            verdict = Verdict.INCONCLUSIVE
            ends = (result.upper, result.lower) if result.kind == "perplexity" else (result.lower, result.upper)
            between = f"between {_signed(result, ends[0])} and {_signed(result, ends[1])}"
            advice = _more(result, margin, planned_looks, policy)
            where = f"the true change may lie {between}, on both sides of {limit}. {advice}"
    saved = result.planned - result.items if verdict is not Verdict.INCONCLUSIVE else 0
    early = f" Decided after {result.items:,} of {result.planned:,} items, which saves {saved:,}." if saved else ""
    change = sentence(f"{_change(result)}; {where}")
    if is_gain:
        change += f" It is a gain: the baseline itself is quantized and rounds its inputs ({baseline_rounding})."
    return Finding("accuracy", task, verdict, f"{change}{early}{_flips(result, floor)}")


def control(baseline: SampleSet, again: SampleSet, confidence: float) -> Control:
    """Return how often the baseline disagrees with itself on the items that it was asked twice.

    Raises `MeasurementError` where the second run was asked something else. The interval is exact: with no flips in n
    items the rate is still up to 1 - (alpha / 2)**(1 / n) (Clopper and Pearson, Biometrika 26, 404-413, 1934).
    """
    from scipy.stats import beta

    pairs = pair(baseline.on(again), again)
    items = len(pairs.baseline)
    flips = sum(before != after for before, after in zip(pairs.baseline, pairs.candidate, strict=True))
    tail = (1 - confidence) / 2
    low = 0.0 if flips == 0 else float(beta.ppf(tail, flips, items - flips + 1))
    high = 1.0 if flips == items else float(beta.ppf(1 - tail, flips + 1, items - flips))
    return Control(items, flips, flips / items, low, high)


def unmeasured(measurements: Measurements, policy: Policy, *, broken: bool) -> Iterator[Finding]:
    """Gated tasks without samples: a fault, unless the canary ended the run, which then says why itself (`broken`)."""
    if not policy.margins:
        reason = "No task decides, so that nothing tells what was lost."
        yield Finding("accuracy", "all tasks", Verdict.INCONCLUSIVE, reason)
    for task in policy.margins:
        if task in measurements.samples:
            continue
        if measurements.stopped is None:
            yield Finding("accuracy", task, Verdict.INVALID, f"{task} decides, but was not measured.")
        elif not broken:
            reason = f"{task} was not measured: the {measurements.stopped} ended the run by limits that were stricter."
            yield Finding("accuracy", task, Verdict.INCONCLUSIVE, reason)


def _more(result: Accuracy, margin: float, looks: int, policy: Policy) -> str:
    needed = more_items(result, margin, policy.power, expected_flip_rate=policy.expected_flip_rate, looks=looks)
    if needed is None or needed > _HOPELESS:
        return "The change lies on the margin, where no number of items decides."
    unasked = result.planned - result.items
    planned = f" {unasked:,} of the planned ones were not asked." if unasked else ""
    return f"About {needed:,} more items would decide, if the change stays as it is.{planned}"


def _flips(result: Accuracy, floor: Control | None) -> str:
    """The candidate's flips against those that the baseline has by itself; of answers that are right or wrong only."""
    if floor is None or result.kind != "binary":
        return ""
    return (
        f" {result.flip_rate:.1%} of the answers flipped; asked again, the baseline flips {floor.rate:.1%} of its "
        f"own ({floor.low:.1%} to {floor.high:.1%}, {floor.items:,} items)."
    )


def _change(result: Accuracy) -> str:
    size, on = _signed(result, result.difference), f"on {result.task}"
    if result.kind == "perplexity":
        return f"{size} {on} (perplexity {result.baseline:.4g} to {result.candidate:.4g}, {result.items} documents)"
    return f"{size} {on} ({result.items} items)"


def _signed(result: Accuracy, difference: float) -> str:
    """A difference as it is written: points of a score; per cent of a perplexity, which rises as it gets worse."""
    return f"{change(result.kind, difference):+.2f}{'%' if result.kind == 'perplexity' else ' points'}"


def _beyond(result: Accuracy, bound: float, *, better: bool) -> str:
    """On which side of a bound the truth lies; of a perplexity, better is below."""
    side = "above" if better == (result.kind != "perplexity") else "below"
    return f"{side} {_signed(result, bound)}"
