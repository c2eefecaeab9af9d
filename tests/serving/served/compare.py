"""Whether a server's answers are those of a checkpoint, read in the right way and in no other.

Servers compute in bfloat16 and round activations at run time: noise upstream flips roundings downstream, so that
answers differ from any reference by as much as the same reference in bfloat16 differs from itself in float32. That is
the measure of a distance here (`Judgement.noise`), and no number of nats.

A wrong reading is told by its direction, in which noise has none. Between the right reading r and a wrong one f, the
answers s lean

    c = <s - r, f - r> / <f - r, f - r>

towards f: 0 is the right reading, 1 is f, and c < 1/2 says that s is nearer to r. The standard error of c follows from
the residuals, prompt by prompt, as tokens that share their context are not independent. Both readings leave
activations in 16 bit here: what rounding them adds to a server's answers has no direction either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.serving.served.readings import Reading, faults, plausible, wrong_caches

if TYPE_CHECKING:
    import torch

    from tests.serving.served.answers import Answers
    from tests.serving.served.cases import Case
    from tests.serving.served.reference import Reference

FLOOR = -12.0
"""Log probabilities end here, nats: what is less likely is never said, and shows little but noise."""
FARTHEST = 1.5
"""The largest distance, in distances between bfloat16 and float32. Seen on a CPU: 0.5 to 1.0,
and 1.7 where an FP8 cache was expected to round and did not."""
SURE = 1.0
"""The lead of a token over the next, nats, above which the reference counts as sure; noise is a tenth of that."""
LEAST_AGREED = 0.95
"""The smallest share of those tokens that a server takes as well: noise has a long tail."""


@dataclass(frozen=True)
class Leaning:
    """How far answers go from the right reading towards a wrong one, and how far the two are apart (mean, nats)."""

    towards: str
    share: float
    error: float
    apart: float

    @property
    def rejected(self) -> bool:
        """Whether the answers are nearer to the right reading, by three standard errors."""
        return self.share + 3 * self.error < 0.5


@dataclass(frozen=True)
class Judgement:
    """What was found of a server's answers.

    ``reading`` is the plausible one that explains them best, at ``distance`` (mean, nats); ``noise`` is how far that
    reading in bfloat16 is from itself in float32. What explains best is at the smallest distance for its noise: a
    reference that leaves out the server's roundings is as near as one that makes them. ``others`` are the distances
    to the other plausible readings and to wrong caches. Of the tokens that the server added, ``greedy`` counts those
    that the reference is sure of, and all where it is sure of one. ``objections`` is empty for the answers of the right
    checkpoint, rightly read.
    """

    reading: str
    distance: float
    noise: float
    others: dict[str, float]
    leanings: tuple[Leaning, ...]
    greedy: tuple[int, int]
    objections: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Rounded for a file of figures."""
        return _rounded(asdict(self))


def judge(case: Case, answers: Answers, said: Callable[[Reading, bool], torch.Tensor]) -> Judgement:
    """Hold answers against a checkpoint; ``said(reading, in_bfloat16)`` is what the reference says, [N]."""
    distances = {reading: distance(answers.logprobs, said(reading, False)) for reading in plausible(case)}
    noises = {reading: distance(said(reading, True), said(reading, False)) for reading in distances}
    right = min(distances, key=lambda reading: distances[reading] / noises[reading])
    reference, noise = said(right, False), noises[right]
    # Without rounded activations: two references that round differ by roundings of their own, which a server has not.
    plain = replace(right, activations=False)
    leanings = tuple(lean(answers, said(plain, False), said(wrong, False), wrong.name) for wrong in faults(case, plain))
    others = {reading.name: value for reading, value in distances.items() if reading is not right}
    objections = [
        f"nearer to {leaning.towards}: {leaning.share:.2f} of the way, standard error {leaning.error:.2f}"
        for leaning in leanings
        if not leaning.rejected
    ]
    if distances[right] > FARTHEST * noise:
        objections.append(f"{distances[right]:.3f} nats from {right.name}, of which arithmetic explains {noise:.3f}")
    for wrong in wrong_caches(right) if case.kv_cache == "fp8" else ():
        others[wrong.name] = distance(answers.logprobs, said(wrong, False))
        if others[wrong.name] <= distances[right]:
            objections.append(f"nearer to {wrong.name}")
    agreed, sure = greedy(answers, reference)
    if agreed < LEAST_AGREED * sure:
        objections.append(f"{sure - agreed} of {sure} greedy tokens are others than those that {right.name} is sure of")
    return Judgement(right.name, distances[right], noise, others, leanings, (agreed, sure), tuple(objections))


def lean(answers: Answers, right: torch.Tensor, wrong: torch.Tensor, towards: str) -> Leaning:
    """The leaning of a server's answers from ``right`` towards ``wrong``, both [N]; NaN where these are the same."""
    said, right, wrong = (values.clamp(min=FLOOR) for values in (answers.logprobs, right, wrong))
    direction, residual = wrong - right, said - right
    size = direction.square().sum()
    share = (direction * residual).sum() / size
    scatter = direction * (residual - share * direction)
    prompts = answers.rows[:, 0]
    by_prompt = scatter.new_zeros(int(prompts.max()) + 1).index_add(0, prompts, scatter)
    error = by_prompt.square().sum().sqrt() / size
    return Leaning(towards, float(share), float(error), float(direction.abs().mean()))


def greedy(answers: Answers, reference: torch.Tensor) -> tuple[int, int]:
    """Of the tokens that the server added: how many are the reference's where it is sure, and at how many it is."""
    import torch

    prompt, place, token = answers.rows.unbind(1)
    agreed = sure = 0
    for number, ids in enumerate(answers.ids.tolist()):
        for after in range(answers.prompt_tokens - 1, len(ids) - 1):
            here = (prompt == number) & (place == after)
            best = reference[here].topk(2)
            if best.values[0] - best.values[1] > SURE:
                sure += 1
                agreed += int(token[here][best.indices[0]] == torch.tensor(ids[after + 1]))
    return agreed, sure


def distance(said: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean |difference| of log probabilities, nats."""
    return float((said.clamp(min=FLOOR) - reference.clamp(min=FLOOR)).abs().mean())


def remembered(reference: Reference, answers: Answers) -> Callable[[Reading, bool], torch.Tensor]:
    """``said`` of `judge`: each reading is computed once."""
    import torch

    known: dict[tuple[Reading, bool], torch.Tensor] = {}

    def said(reading: Reading, in_bfloat16: bool) -> torch.Tensor:
        key = (reading, in_bfloat16)
        if key not in known:
            dtype = torch.bfloat16 if in_bfloat16 else torch.float32
            known[key] = reference.logprobs(answers, reading, dtype=dtype)
        return known[key]

    return said


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
