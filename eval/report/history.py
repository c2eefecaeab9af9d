"""Sentences on the earlier verdicts of a model, for the page, the card and the terminal.

Judged before, once: FAIL on 2026-11-26, tiny_facts -2.70 pt at a margin of -2.00 pt, confidence 0.95, the same
weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantmint.eval.gate import GateReport
from quantmint.eval.history import EarlierVerdict, JudgedTask
from quantmint.eval.report.numbers import unit_of
from quantmint.eval.verdict import Verdict

_SHOWN = 5


def widened(gate: GateReport) -> str | None:
    """Return a sentence on limits that are wider than those of an earlier verdict other than PASS; None if none are.

    The newest such verdict is named; one on other weights of the same source counts too.
    """
    for earlier in reversed(gate.history):
        if earlier.verdict is not Verdict.PASS and (phrases := list(_wider(earlier, gate))):
            return (
                f"Limits were widened after the data was seen: {'; '.join(phrases)}. The verdict before was "
                f"{earlier.verdict.value}, on {earlier.judged[:10]}, for {_subject(earlier, gate)}."
            )
    return None


def history_notes(gate: GateReport) -> Iterator[str]:
    """Yield the sentences on earlier verdicts: limits that were widened, then one list of the verdicts, PASS last."""
    if not gate.history:
        return
    if (sentence := widened(gate)) is not None:
        yield sentence
    newest_first = gate.history[::-1]
    ordered = sorted(newest_first, key=lambda earlier: earlier.verdict is Verdict.PASS)
    phrases = [_phrase(earlier, gate) for earlier in ordered[:_SHOWN]]
    if len(ordered) > _SHOWN:
        phrases.append(f"{len(ordered) - _SHOWN} more in gate.json")
    times = "once" if len(ordered) == 1 else f"{len(ordered)} times"
    yield f"Judged before, {times}: {'; '.join(phrases)}."


def _wider(earlier: EarlierVerdict, gate: GateReport) -> Iterator[str]:
    policy = gate.policy
    for task, judged in earlier.tasks.items():
        margin = policy.margins.get(task)
        if margin is None:
            yield f"{task} decided and now does not"
        elif margin > judged.margin:
            unit = unit_of(judged.kind)
            yield f"the margin of {task} was {unit.margin_words(judged.margin)} and is {unit.margin_words(margin)}"
    if policy.confidence < earlier.confidence:
        yield f"the confidence was {earlier.confidence:.4g} and is {policy.confidence:.4g}"
    if earlier.min_ratio is not None and (policy.min_ratio is None or policy.min_ratio < earlier.min_ratio):
        promised = "nothing" if policy.min_ratio is None else f"{policy.min_ratio:.3g} times"
        yield f"the promised throughput was {earlier.min_ratio:.3g} times the baseline's and is {promised}"


def _phrase(earlier: EarlierVerdict, gate: GateReport) -> str:
    tasks = [_task(name, judged) for name, judged in earlier.tasks.items()]
    released = [] if earlier.release is None else [f"released as {earlier.release}"]
    parts = [*tasks, f"confidence {earlier.confidence:.4g}", _subject(earlier, gate), *released]
    return f"{earlier.verdict.value} on {earlier.judged[:10]}, {', '.join(parts)}"


def _task(name: str, judged: JudgedTask) -> str:
    unit = unit_of(judged.kind)
    measured = "not asked" if judged.change is None else unit.words(judged.change)
    return f"{name} {measured} at a margin of {unit.margin_words(judged.margin)}"


def _subject(earlier: EarlierVerdict, gate: GateReport) -> str:
    if earlier.artefact == gate.artefact:
        return "the same weights"
    return f"other weights of the same source in {' + '.join(earlier.schemes)}"
