"""Flips: the items whose score changed with the answers behind them, and how many change by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from quantmint.eval.accuracy import Accuracy
from quantmint.eval.gate import Control, GateReport
from quantmint.eval.report.model import Direction, Flip, Report, TaskFlips
from quantmint.eval.report.numbers import percent
from quantmint.eval.report.plots import both_widths, colour, figure, inline, plain_ticks, row_title
from quantmint.eval.samples import SampleSet

Key = tuple[str, int, str]
Answers = Mapping[Key, Mapping[str, Any]]


def by_item(answers: Iterable[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    """Return answers by the key of their item: (leaf task, document number, filter)."""
    return {(answer["task"], answer["doc_id"], answer["filter"]): answer for answer in answers}


def flips(baseline: SampleSet, candidate: SampleSet, before: Answers, after: Answers) -> TaskFlips:
    """Return the items whose score differs between the sides, in the order in which the candidate was asked.

    `before` and `after` are the baseline's and the candidate's answers by item; an item without one has "" texts. A
    perplexity task has no flips.
    """
    scores = {sample.key: sample.score for sample in baseline.samples}
    flips: list[Flip] = []
    for sample in candidate.samples:
        score = scores.get(sample.key)
        if baseline.kind != "score" or score is None or score == sample.score:
            continue
        reference, answer = before.get(sample.key, {}), after.get(sample.key, {})
        flips.append(
            {
                "task": sample.task,
                "doc_id": sample.doc_id,
                "direction": "gained" if sample.score > score else "lost",
                "scores": (score, sample.score),
                "prompt": str(reference.get("prompt", "")),
                "target": str(reference.get("target", "")),
                "baseline": said(reference),
                "candidate": said(answer),
            }
        )
    return {"task": baseline.task, "flips": flips}


def said(answer: Mapping[str, Any]) -> str:
    """Return a side's answer as text for the page.

    Of a multiple-choice item it lists all choices with their log likelihoods in nats, an arrow at the chosen one. Of
    generated text it is the text, followed by the extracted answer where that differs.
    """
    response = str(answer.get("response", ""))
    choices, likelihoods = answer.get("choices"), answer.get("loglikelihoods")
    if isinstance(choices, list) and isinstance(likelihoods, list) and len(choices) == len(likelihoods):
        return "\n".join(
            f"{'→' if choice == response else ' '} {likelihood:9.3f}  {choice}".replace("-", "\N{MINUS SIGN}", 1)
            for choice, likelihood in zip(choices, likelihoods, strict=True)
        )
    if isinstance(likelihoods, list) and len(likelihoods) == 1:
        return f"{response or '(something else)'}   log likelihood of the right text {likelihoods[0]:.3f}"
    extracted = answer.get("extracted")
    if isinstance(extracted, str) and extracted.strip() != response.strip():
        return f"{response}\n\n[taken as the answer: {extracted}]"
    return response


SHOWN = 100
"""Flips of a task and direction that the page holds; report.json has all."""
FOLDED, LONGEST = 700, 6_000
"""Characters of a text above which it is folded, and above which the page leaves out its middle: models that reason
write tens of thousands."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text for the page: `start` is shown at once, `whole` when it is unfolded (None: `start` is all of it).

    `length` counts the characters of the original, of which `whole` may leave out the middle.
    """

    start: str
    whole: str | None
    length: int


def text(value: str, *, end: bool = False) -> Text:
    """Shorten a text for the page; with ``end`` its end is shown at once instead of its start."""
    if len(value) <= FOLDED:
        return Text(value, None, len(value))
    cut = f"\N{HORIZONTAL ELLIPSIS}{value[-FOLDED:]}" if end else f"{value[:FOLDED]}\N{HORIZONTAL ELLIPSIS}"
    half = LONGEST // 2
    left_out = len(value) - LONGEST
    whole = value if left_out <= 0 else (
        f"{value[:half]}\n\n[{left_out:,} characters are left out here; report.json has them]\n\n{value[-half:]}"
    )  # fmt: skip
    return Text(cut, whole, len(value))


def view(report: Report, gate: GateReport) -> dict[str, Any] | None:
    """Return the values of the template's section on flips; None if no task has scores that could flip."""
    scored = [result for result in gate.accuracy if result.kind != "perplexity"]
    if not scored:
        return None
    shown = {entry["task"]: entry["flips"] for entry in report["flips"]}
    tasks = [
        {
            "result": result,
            "directions": [_direction(name, shown.get(result.task, [])) for name in get_args(Direction)],
            "known": any(shown.get(result.task, [])),
        }
        for result in scored
    ]
    return {
        "tasks": tasks,
        "plot": both_widths(partial(bars, scored, gate.control), "flips"),
        "controlled": any(result.task in gate.control for result in scored),
    }


def _direction(direction: Direction, found: list[Flip]) -> dict[str, Any]:
    mine = [flip for flip in found if flip["direction"] == direction]
    return {
        "name": direction,
        "flips": [
            {
                "flip": flip,
                "prompt": text(flip["prompt"], end=True),
                "target": text(flip["target"]),
                "baseline": text(flip["baseline"]),
                "candidate": text(flip["candidate"]),
                "peek": _peek(flip),
            }
            for flip in mine[:SHOWN]
        ],
        "more": max(0, len(mine) - SHOWN),
    }


def _peek(flip: Flip) -> str:
    """Return the end of the prompt's last line that is more than 24 characters long, unlike a mere "Answer:"."""
    lines = [line.strip() for line in flip["prompt"].splitlines() if line.strip()]
    long_lines = [line for line in lines if len(line) > 24] or lines
    return long_lines[-1][-160:] if long_lines else ""


def bars(results: Sequence[Accuracy], floors: Mapping[str, Control], *, width: int, name: str) -> str:
    """Draw a stacked bar of losses and gains per task, as an inline SVG.

    `floors` are the A/A controls by task: a mark on the bar shows the rate, a line through it the interval.
    """
    row, top, bottom = 50, 4, 42
    height = top + bottom + row * len(results)
    sentences = []
    with figure(width, height, (0, 0, top, bottom)) as (drawing, axis):
        floor_rates = [floors[result.task].high for result in results if result.task in floors]
        axis.set_xlim(0, 1.06 * max(0.1, *(100 * share for share in (*floor_rates, *(r.flip_rate for r in results)))))
        axis.set_ylim(len(results), 0)
        for index, result in enumerate(results):
            lost, gained = 100 * result.losses / result.items, 100 * result.gains / result.items
            floor, tail, y = floors.get(result.task), percent(result.flip_rate), index + 0.68
            axis.barh(y, lost, height=0.3, color=colour("fail"), linewidth=0, alpha=0.85)
            axis.barh(y, gained, left=lost, height=0.3, color=colour("pass"), linewidth=0, alpha=0.85)
            if floor is not None:
                tail += f", floor {percent(floor.rate)}"
                axis.plot([100 * floor.low, 100 * floor.high], [y, y], color=colour("ink"), linewidth=1.4)
                axis.plot([100 * floor.rate] * 2, [y - 0.24, y + 0.24], color=colour("ink"), linewidth=2.4)
            row_title(axis, index + 0.28, result.task, tail, width)
            sentences.append(f"{result.task}: {lost:.2f} % lost, {gained:.2f} % gained")
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        plain_ticks(axis, x=max(3, width // 95))
        axis.set_xlabel("items whose score changed, %")
        return inline(drawing, name=name, label=f"Flips. {'; '.join(sentences)}")
