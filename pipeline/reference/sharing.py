"""Prompts that begin alike, read together: what they share is computed once.

A question with four choices is four prompts of nearly the same tokens. The shared beginning goes through the model
alone; its keys and values are then every member's, and only the endings differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reference.cache import kv_cache
from pipeline.reference.forward import forward, padded, positions
from pipeline.reference.model import Loaded
from pipeline.reference.questions import Answer, Position, Question

if TYPE_CHECKING:
    import torch

_WORTH = 0.75  # of the tokens, for which two passes are taken


@dataclass(frozen=True, slots=True)
class Family:
    """Prompts, by number, with the tokens that all of them begin with; each has at least one token more."""

    prefix: tuple[int, ...]
    members: tuple[int, ...]


def families(prompts: Sequence[tuple[int, ...]]) -> list[Family]:
    """Group prompts, each of at least two tokens, with those that share at least half of their tokens."""
    found: list[Family] = []
    for number in sorted(range(len(prompts)), key=prompts.__getitem__):
        ids = prompts[number]
        last = found[-1] if found else None
        common = 0 if last is None else _common(last.prefix, ids[:-1])
        if last is not None and 2 * common >= max(len(last.prefix), len(ids)):
            found[-1] = Family(ids[:common], (*last.members, number))
        else:
            found.append(Family(ids[:-1], (number,)))
    return found


def read_shared(loaded: Loaded, questions: Sequence[Question]) -> list[Answer] | None:
    """Read prompts whose log probabilities are wanted, and at most one token more; None where sharing saves little."""
    prompts = [question.ids for question in questions]
    if min(map(len, prompts)) < 2:
        return None
    found = families(prompts)
    endings = sum(len(prompts[number]) - len(family.prefix) for family in found for number in family.members)
    if sum(len(family.prefix) for family in found) + endings > _WORTH * sum(map(len, prompts)):
        return None
    return _Reading(loaded, questions, found).run()


class _Reading:
    def __init__(self, loaded: Loaded, questions: Sequence[Question], found: Sequence[Family]) -> None:
        self._loaded, self._questions, self._families = loaded, questions, found
        self._owner = [row for row, family in enumerate(found) for _ in family.members]
        self._order = [number for family in found for number in family.members]
        self._top = max(max(question.prompt_top or 0, question.top or 0) for question in questions)

    def run(self) -> list[Answer]:
        import torch

        loaded, prefixes = self._loaded, [family.prefix for family in self._families]
        ids, mask, places = padded(prefixes, loaded.device)
        cache = kv_cache(loaded.model.config.get_text_config(), loaded.kv_scales)
        began = forward(loaded, ids, mask=mask, places=places, cache=cache)
        width, rows = ids.shape[1], torch.tensor(self._owner, device=loaded.device)
        shared = list(self._shared(began, ids, [width - len(prefix) for prefix in prefixes]))
        cache.batch_select_indices(rows)
        endings = [
            self._questions[n].ids[len(prefixes[row]) :] for n, row in zip(self._order, self._owner, strict=True)
        ]
        longest = max(map(len, endings))
        # Padding after an ending is seen by no token before it.
        ids = torch.tensor([[*ending, *[0] * (longest - len(ending))] for ending in endings], device=loaded.device)
        places = places[rows][:, -1:] + 1 + torch.arange(longest, device=loaded.device)
        if mask is not None:
            mask = torch.cat((mask[rows], mask.new_ones(ids.shape)), dim=1)
        ended = forward(loaded, ids, mask=mask, places=places, cache=cache)
        # What follows the prefix is said by its last token, what follows an ending's token by that one.
        logits = torch.cat((began[rows, -1:], ended), dim=1)
        return self._answers(shared, self._said(logits, endings))

    def _shared(
        self, logits: torch.Tensor, ids: torch.Tensor, padding: Sequence[int]
    ) -> Iterator[tuple[Position, ...]]:
        """The positions of each prefix but for its first token."""
        import torch

        spots = [(row, place) for row, pad in enumerate(padding) for place in range(pad, ids.shape[1] - 1)]
        if not spots:
            yield from (() for _ in padding)
            return
        rows, columns = torch.tensor(spots, device=ids.device).unbind(1)
        found = iter(positions(logits, ids[rows, columns + 1], self._top, at=(rows, columns)))
        for pad in padding:
            yield tuple(next(found) for _ in range(ids.shape[1] - 1 - pad))

    def _said(self, logits: torch.Tensor, endings: Sequence[Sequence[int]]) -> Iterator[tuple[Position, ...]]:
        """The positions of each ending's tokens, and of the likeliest token after them."""
        import torch

        after = (
            logits[torch.arange(len(endings)), torch.tensor([len(ending) for ending in endings])].argmax(-1).tolist()
        )
        tokens = [[*ending, following] for ending, following in zip(endings, after, strict=True)]
        spots = [(row, place) for row, ending in enumerate(tokens) for place in range(len(ending))]
        rows, columns = torch.tensor(spots, device=logits.device).unbind(1)
        wanted = torch.tensor([token for ending in tokens for token in ending], device=logits.device)
        found = iter(positions(logits, wanted, self._top, at=(rows, columns)))
        for ending in tokens:
            yield tuple(next(found) for _ in ending)

    def _answers(self, shared: Sequence[tuple[Position, ...]], said: Iterator[tuple[Position, ...]]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for number, row, own in zip(self._order, self._owner, said, strict=True):
            question, following = self._questions[number], own[-1]
            made = (following,) if question.max_tokens else ()
            answers[number] = Answer(
                ids=tuple(position.token for position in made),
                prompt=tuple(position.cut(question.prompt_top) for position in (*shared[row], *own[:-1])),
                positions=tuple(p.cut(question.top) for p in made) if question.top is not None else (),
                stopped=following.token if made and following.token in question.ends else None,
            )
        return [answers[number] for number in range(len(self._questions))]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
