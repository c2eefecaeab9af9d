"""Samples of both sides joined with the answers behind them: the items whose score changed, to be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.report.model import Flip, TaskFlips
from eval.samples import SampleSet

Key = tuple[str, int, str]
Answers = Mapping[Key, Mapping[str, Any]]


def by_item(answers: Iterable[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    """Answers by the item that they belong to; one that names none is left out, since it is only there to be seen."""
    found: dict[Key, Mapping[str, Any]] = {}
    for answer in answers:
        task, number, name = answer.get("task"), answer.get("doc_id"), answer.get("filter")
        if isinstance(task, str) and isinstance(number, int) and isinstance(name, str):
            found[(task, number, name)] = answer
    return found


def flips(baseline: SampleSet, candidate: SampleSet, before: Answers, after: Answers) -> TaskFlips:
    """The items of both sides whose score differs, in the order in which the candidate was asked."""
    scores = {sample.key: sample.score for sample in baseline.samples}
    found: list[Flip] = []
    for sample in candidate.samples:
        score = scores.get(sample.key)
        if baseline.kind != "score" or score is None or score == sample.score:
            continue
        one, other = before.get(sample.key, {}), after.get(sample.key, {})
        found.append(
            {
                "task": sample.task,
                "doc_id": sample.doc_id,
                "direction": "gained" if sample.score > score else "lost",
                "scores": (score, sample.score),
                "prompt": str(one.get("prompt", "")),
                "target": str(one.get("target", "")),
                "baseline": said(one),
                "candidate": said(other),
            }
        )
    return {"task": baseline.task, "flips": found}


def said(answer: Mapping[str, Any]) -> str:
    """What a side answered: its text with what was taken from it, or the choice that it took, of which.

    A choice stands with its log likelihood in nats; the arrow marks the one that was taken.
    """
    response, choices, likelihoods = (
        str(answer.get("response", "")),
        answer.get("choices"),
        answer.get("loglikelihoods"),
    )
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
