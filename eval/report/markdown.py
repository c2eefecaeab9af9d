"""A report as the section of a model card: plain Markdown, with tables that every renderer knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quantmint.eval.gate import GateReport
from quantmint.eval.report import numbers
from quantmint.eval.report.model import Report
from quantmint.eval.report.numbers import NO_BREAK, PER_CENT, level, percent, signed, three, unit_of
from quantmint.eval.report.summary import meaning, notes, runtime, worst_first
from quantmint.eval.verdict import Verdict

_BLANKS = re.compile(r"[^\S\xa0]+")
_SIGNS = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#$~&"})


def render(report: Report) -> str:
    """Return the report as Markdown: verdict, tables with intervals and counts, recipe, versions, and limits."""
    gate = GateReport.from_json(report["gate"])
    noted = notes(report, gate)
    limited = [*(plain(note) for note in noted if "\n" not in note), *limits(gate)]
    blocks = [fenced(note) for note in noted if "\n" in note]  # what the advice says to paste
    parts = [
        ("## Evaluation", _verdict(report, gate)),
        ("### Accuracy", accuracy(gate)),
        ("### Throughput", throughput(report, gate)),
        ("### Speculative decoding", acceptance(gate)),
        ("### Size", size(report)),
        ("### How it was made", _origin(report)),
        ("### Limits", "\n\n".join(["\n".join(f"- {limit}" for limit in limited), *blocks])),
    ]
    return "\n\n".join(f"{heading}\n\n{part}" for heading, part in parts if part) + "\n"


def plain(text: str) -> str:
    """Return text escaped for Markdown, on one line; no-break blanks, which keep a number beside its unit, stay."""
    return _BLANKS.sub(" ", text).strip().translate(_SIGNS)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column is aligned left, the others, which hold figures, right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *[[plain(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(report: Report, gate: GateReport) -> str:
    machine = plain(gate.device or gate.hardware)
    where = f"Measured beside its 16-bit baseline with {plain(runtime(report))} on {machine}"
    lines = [f"**{gate.verdict.value}**: {plain(meaning(report, gate))} {where}."]
    if unresolved := not_passed(gate):
        lines.append("\n".join(f"- {reason}" for reason in unresolved))
    return "\n\n".join(lines)


def not_passed(gate: GateReport) -> list[str]:
    """Return a line of Markdown for every finding that is no PASS, the worst first."""
    findings = [finding for finding in worst_first(gate.findings) if finding.verdict is not Verdict.PASS]
    return [f"{finding.verdict.value}: {plain(finding.reason)}" for finding in findings]


def accuracy(gate: GateReport) -> str:
    """Return the table of tasks with a note on flips; "" if no task was asked."""
    if not gate.accuracy:
        return ""
    rows = []
    for result in gate.accuracy:
        unit, margin = unit_of(result.kind), gate.policy.margins.get(result.task)
        low, high = unit.span(result.interval_low, result.interval_high)
        verdict = gate.verdict_of("accuracy", result.task)
        span = f"{signed(low)} to {signed(high)}".replace(" ", NO_BREAK)
        rows.append(
            [
                f"{result.task} ({result.metric})",
                level(result, result.baseline),
                level(result, result.candidate),
                f"{unit.words(result.difference)} ({span})",
                percent(result.recovery),
                f"{result.items:,}" + (f" of {result.planned:,}" if result.items < result.planned else ""),
                "shown only"
                if margin is None or verdict is None
                else f"{verdict.value} at {unit.margin_words(margin)}",
            ]
        )
    confidence = f"{gate.accuracy[0].confidence:.0%}".replace("%", PER_CENT)
    head = ["Task", "Baseline", "This model", f"Change ({confidence} interval)", "Recovery", "Items",
            "Verdict at margin"]  # fmt: skip
    sentences = "The same items were put to both models; intervals are of the paired difference."
    return f"{table(head, rows)}\n\n{sentences}{_flips(gate)}"


def _flips(gate: GateReport) -> str:
    controlled = [result for result in gate.accuracy if result.task in gate.control]
    if not controlled:
        return ""
    said = "; ".join(
        f"{plain(result.task)} {percent(result.flip_rate)} (the baseline asked twice: "
        f"{percent(gate.control[result.task].rate)})"
        for result in controlled
    )
    return f" Answers whose score changed: {said}."


def throughput(report: Report, gate: GateReport) -> str:
    """Return the table of loads, with where they were measured; "" if throughput was not measured."""
    if not gate.throughput:
        return ""
    rows = [
        [
            cell.cell,
            numbers.figure(cell.baseline / cell.gpus),
            numbers.figure(cell.candidate / cell.gpus),
            f"{cell.ratio:.3f}",
            f"{cell.ratio_low:.3f} to {cell.ratio_high:.3f}" if cell.repeated else "one launch",
            f"{three(cell.latency['ttft_p50'][1])} / {three(cell.latency['ttft_p99'][1])}",
            f"{three(cell.latency['itl_p50'][1])} / {three(cell.latency['itl_p99'][1])}",
            f"{cell.launches[0]} + {cell.launches[1]}",
        ]
        for cell in gate.throughput
    ]
    gpus = gate.throughput[0].gpus
    unit = "output tok/s per GPU" if gpus > 1 else "output tok/s"
    head = ["Load", f"Baseline, {unit}", f"This model, {unit}", "Ratio", "Interval", "TTFT p50 / p99, ms",
            "ITL p50 / p99, ms", "Launches"]  # fmt: skip
    where = f"{gpus} x {gate.device or gate.hardware}" if gpus > 1 else gate.device or gate.hardware
    said = f"On {plain(where)} with {plain(runtime(report))}. Every launch is a fresh server; medians over launches."
    return f"{table(head, rows)}\n\n{said}"


def acceptance(gate: GateReport) -> str:
    """Return the table of speculative decoding with the method; "" if the sides were served without it."""
    drafts = gate.acceptance
    if drafts is None:
        return ""
    promise, verdict = gate.policy.acceptance, gate.verdict_of("acceptance")
    outcome = (
        "shown only" if promise is None or verdict is None else f"{verdict.value} at {1 - promise.margin:.3g} or more"
    )
    row = [
        "Acceptance length, tokens a step",
        f"{drafts.baseline:.3f}",
        f"{drafts.candidate:.3f}",
        f"{drafts.ratio:.3f} ({drafts.low:.3f} to {drafts.high:.3f})",
        outcome,
    ]
    note = (
        f"With {plain(drafts.method)}, up to {drafts.tokens} tokens at a time; both models continued the same "
        f"{drafts.prompts} texts. The bounds are clustered by text."
    )
    return f"{table(['Measure', 'Baseline', 'This model', 'Ratio (bounds)', 'Verdict'], [row])}\n\n{note}"


def size(report: Report) -> str:
    """Return the table of bytes by part, with a sentence on the KV cache's tokens if both sides have them."""
    sizes = report["size"]
    rows = [[part["name"], numbers.size(part["baseline_bytes"]), numbers.size(part["candidate_bytes"])]
            for part in sizes["parts"]]  # fmt: skip
    rows.append(["all", numbers.size(sizes["baseline_bytes"]), numbers.size(sizes["candidate_bytes"])])
    text, room = table(["Part", "Baseline", "This model"], rows), report["kv_tokens"]
    if room.get("baseline") and room.get("candidate"):
        text += f"\n\nThe KV cache holds {room['candidate']:,} tokens, the baseline's {room['baseline']:,}."
    return text


def fenced(text: str, language: str = "") -> str:
    """Return a fenced block of code with the text; the fence is longer than any backticks in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _origin(report: Report) -> str:
    versions = ", ".join(f"{plain(name)} {plain(version)}" for name, version in report["versions"].items())
    return (
        f"{plain(report['scheme'])}, from {plain(report['model'])}, by this recipe:\n\n"
        f"{fenced(report['recipe'], 'yaml')}\n\n{fenced(chr(10).join(report['reproduce']), 'sh')}\n\n"
        f"Versions: {versions}."
    )


def limits(gate: GateReport) -> list[str]:
    """Return sentences on what the figures do not show."""
    lines: list[str] = []
    if gate.accuracy:
        lines.append(
            "Accuracy was measured on the tasks above and in their language and format; it says nothing of others."
        )
    if gate.unmeasured_speed is not None:
        lines.append(gate.unmeasured_speed)
    shown = [plain(result.task) for result in gate.accuracy if result.task not in gate.policy.margins]
    if shown:
        lines.append(f"Shown, but not decided by: {', '.join(shown)}.")
    return lines
