"""The first screen: the verdict, why, where it was measured, the figures that people ask for, what the guides say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, get_args

from quantmint.eval.gate import Finding, GateReport, Kind
from quantmint.eval.reasoning import METRIC as SAMPLED
from quantmint.eval.report import numbers
from quantmint.eval.report.history import history_notes
from quantmint.eval.report.model import Report, ServedSide
from quantmint.eval.report.numbers import ARROW, TIMES, unit_of
from quantmint.eval.verdict import Verdict

AT_ONCE = 4
"""Reasons that are seen without opening anything."""

MEANING = {
    Verdict.PASS: "The candidate keeps every promise of its recipe.",
    Verdict.FAIL: "The candidate breaks a promise of its recipe.",
    Verdict.INCONCLUSIVE: "The measurements are sound, but do not decide.",
    Verdict.INVALID: "The measurements cannot be trusted, so they say nothing about the checkpoint.",
}
_STOPPED = (
    "The canary stopped this checkpoint in its first minute: it no longer says what its baseline says, so nothing "
    "longer was measured."
)
_DOUBTFUL = " It may yet be sound: with `canary: null` its tasks are asked."
_TITLES: Final = {"kl": "KL"}
"""Names of kinds of findings that are not their words."""


def meaning(report: Report, gate: GateReport) -> str:
    """Return the sentence that explains the verdict, for a run that the canary stopped as well."""
    if report["stopped"] is None:
        return MEANING[gate.verdict]
    return _STOPPED + (_DOUBTFUL if gate.verdict is Verdict.INCONCLUSIVE else "")


def view(report: Report, gate: GateReport) -> dict[str, Any]:
    """Return the values of the template's first screen."""
    ordered = worst_first(gate.findings)
    unresolved = [finding for finding in ordered if finding.verdict is not Verdict.PASS]
    passed = [finding for finding in ordered if finding.verdict is Verdict.PASS]
    deciding = unresolved or passed
    return {
        "meaning": meaning(report, gate),
        "runtime": runtime(report),
        "device": gate.device or gate.hardware,
        "deciding": deciding[:AT_ONCE],
        "further": deciding[AT_ONCE:],
        "passed": passed if unresolved else [],
        "kinds": [(_TITLES.get(kind, kind), verdict) for kind in get_args(Kind) if (verdict := gate.verdict_of(kind))],
        "notes": notes(report, gate),
        "tiles": tiles(report, gate),
        "headlines": gate.claims,
    }


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings sorted from the worst verdict to the best; equal verdicts keep the gate's order."""
    order = list(Verdict)
    return sorted(findings, key=lambda finding: -order.index(finding.verdict))


def runtime(report: Report) -> str:
    """Return the candidate's runtime with its version; "" if the report has no server of the candidate."""
    return next((answered_by(plan) for plan in report["servers"] if plan["side"] == "candidate"), "")


def answered_by(plan: ServedSide) -> str:
    """Return a side's runtime, with its version where the name lacks it."""
    name = plan["runtime"] if plan["version"] in plan["runtime"] else f"{plan['runtime']} {plan['version']}"
    return re.sub("^vllm", "vLLM", name)


def tiles(report: Report, gate: GateReport) -> list[tuple[str, str, str]]:
    """Return (caption, figure, explanation) for each figure of the first screen."""
    size = report["size"]
    sizes = f"{numbers.size(size['baseline_bytes'])} {ARROW} {numbers.size(size['candidate_bytes'])}"
    facts = [("Size", f"{size['candidate_bytes'] / size['baseline_bytes']:.2f}{TIMES}", sizes)]
    facts += _accuracy(gate)
    if gate.throughput:
        least = min(gate.throughput, key=lambda cell: cell.ratio)
        span = (
            f"{least.ratio_low:.2f} \N{HORIZONTAL ELLIPSIS} {least.ratio_high:.2f}" if least.repeated else "one launch"
        )
        several = ", the least gain" if len(gate.throughput) > 1 else ""
        facts.append(("Throughput", numbers.ratio(least.ratio), f"{span}, {least.cell}{several}"))
    elif gate.canary is not None:
        canary = gate.canary
        facts.append(("Same next token", numbers.percent(canary.agreement), f"KL {numbers.figure(canary.kl)} nats"))
    if gate.kl is not None and gate.policy.kl is not None and gate.kl.upper is not None:
        promised = f"at most {numbers.figure(gate.kl.upper)}, promised {numbers.figure(gate.policy.kl.max)}"
        facts.append(("KL divergence, nats", numbers.figure(gate.kl.value), promised))
    room = report["kv_tokens"]
    if room.get("baseline") and room.get("candidate"):
        tokens = f"{room['baseline']:,} {ARROW} {room['candidate']:,}"
        facts.append(("KV cache tokens", numbers.ratio(room["candidate"] / room["baseline"]), tokens))
    return facts


def notes(report: Report, gate: GateReport) -> list[str]:
    """Return the sentences that a reader must know before the figures.

    They tell of earlier verdicts, of figures from other hardware than promised, and of weights larger than a guide
    says, followed by the report's own notes.
    """
    promised = gate.policy.hardware
    sentences = []
    if gate.throughput and promised is not None and gate.hardware != promised:
        sentences.append(
            f"The recipe promises its throughput on {promised}. What was measured on {gate.device or gate.hardware} "
            "neither keeps nor breaks that promise: it is shown as what it is."
        )
    known = [*history_notes(gate), *sentences]
    known += [sentence for sentence in (None if sentences else _target(report, gate), _size(report, gate)) if sentence]
    return [*known, *report["notes"]]


def _target(report: Report, gate: GateReport) -> str | None:
    """Return a sentence that the figures come from other hardware than the recipe's target; None if they do not."""
    target = gate.policy.hardware
    if target in (None, gate.hardware):
        return None
    return f"The recipe is for {target}; everything here was measured on {gate.device or gate.hardware}."


def _size(report: Report, gate: GateReport) -> str | None:
    """Return a sentence on why the weights are not as small as a guide says of such a checkpoint; None if they are."""
    row = next((row for row in gate.claims if row.name.startswith("memory") and row.kept is False), None)
    size = report["size"]
    whole = [part for part in size["parts"] if part["candidate_bytes"] >= part["baseline_bytes"] > 0]
    if row is None or row.measured is None or not whole:
        return None
    kept_bytes = sum(part["candidate_bytes"] for part in whole)
    names = ", ".join(part["name"] for part in whole)
    return (
        f"The weights are {row.measured:.2f} times smaller, and not {row.promised:.3g} times as a guide has it: "
        f"{numbers.size(kept_bytes)} of {numbers.size(size['candidate_bytes'])} are as large as before: {names}."
    )


def _accuracy(gate: GateReport) -> list[tuple[str, str, str]]:
    decided = [result for result in gate.accuracy if result.task in gate.policy.margins]
    scored = [result for result in decided if result.kind != "perplexity"]
    perplexed = [result for result in decided if result.kind == "perplexity"]
    sentences = []
    for results in filter(None, (scored, perplexed)):
        worst = min(results, key=lambda result: result.difference / gate.policy.margins[result.task])
        unit = unit_of(worst.kind)
        said = f"{worst.task}, margin {unit.margin_words(gate.policy.margins[worst.task])}"
        caption = "Perplexity" if unit.perplexity else "Accuracy"
        sentences.append((caption, unit.words(worst.difference), said))
    if scored := [result for result in scored if result.metric != SAMPLED]:  # sampled answers change by themselves
        most = max(scored, key=lambda result: result.flip_rate)
        control = gate.control.get(most.task)
        floor = "" if control is None else f", floor {numbers.percent(control.rate)}"
        sentences.append(("Answers flipped", numbers.percent(most.flip_rate), f"{most.task}{floor}"))
    return sentences
