"""Answering a batch of questions: one pass over the prompts, then the likeliest token, again and again.

Prompts of different lengths are padded on their left, so that all of them end at the same place; positions and the mask
leave the padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeline.reference.cache import kv_cache
from pipeline.reference.forward import forward, padded, positions
from pipeline.reference.model import Loaded
from pipeline.reference.questions import Answer, Position, Question
from pipeline.reference.sharing import read_shared

if TYPE_CHECKING:
    import torch

StopString = Callable[[Sequence[int], Sequence[str]], str | None]
"""Which of some strings is in the text of an answer's tokens."""


def answer(loaded: Loaded, questions: Sequence[Question], stop_string: StopString) -> list[Answer]:
    """Answer questions together, in their order. Memory is that of the longest for all of them."""
    import torch

    with torch.inference_mode():
        if all(question.prompt_top is not None and question.max_tokens <= 1 for question in questions):
            shared = read_shared(loaded, questions)
            if shared is not None:
                return shared
        return _Batch(loaded, questions, stop_string).run()


class _Batch:
    """Rows are questions that go on; ``_alive`` are their numbers."""

    def __init__(self, loaded: Loaded, questions: Sequence[Question], stop_string: StopString) -> None:
        self._loaded, self._questions, self._stop_string = loaded, questions, stop_string
        self._alive = list(range(len(questions)))
        self._made: list[list[Position]] = [[] for _ in questions]
        self._stopped: list[str | int | None] = [None for _ in questions]
        prompts = [question.ids for question in questions]
        self._ids, self._mask, self._places = padded(prompts, loaded.device)
        self._padding = [self._ids.shape[1] - len(ids) for ids in prompts]
        generates = max(question.max_tokens for question in questions) > 1
        self._cache = (
            kv_cache(loaded.model.config.get_text_config(), loaded.kv_scales) if generates or loaded.kv_scales else None
        )

    def run(self) -> list[Answer]:
        wanted = any(question.prompt_top is not None for question in self._questions)
        logits = self._forward(self._ids, last_only=not wanted)
        prompts = self._read(logits) if wanted else [() for _ in self._questions]
        logits = logits[:, -1]
        self._keep([row for row, question in enumerate(self._questions) if question.max_tokens > 0])
        logits = logits[self._alive]
        while self._alive:
            tokens = self._take(logits)
            going = [row for row, number in enumerate(self._alive) if not self._is_done(number)]
            if not going:
                break
            self._keep(going)
            logits = self._step(tokens[going])
        return [
            Answer(
                ids=tuple(position.token for position in made),
                prompt=tuple(prompt),
                positions=tuple(made) if question.top is not None else (),
                stopped=stopped,
            )
            for question, prompt, made, stopped in zip(self._questions, prompts, self._made, self._stopped, strict=True)
        ]

    def _forward(self, ids: torch.Tensor, *, last_only: bool) -> torch.Tensor:
        return forward(self._loaded, ids, mask=self._mask, places=self._places, cache=self._cache, last_only=last_only)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        self._places = self._places[:, -1:] + 1
        if self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(self._alive), 1)), dim=1)
        return self._forward(tokens.unsqueeze(1), last_only=True)[:, -1]

    def _keep(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        import torch

        if len(rows) == len(self._alive):
            return
        self._alive = [self._alive[row] for row in rows]
        if not rows:
            return
        chosen = torch.tensor(rows, device=self._loaded.device)
        self._places = self._places[chosen]
        self._mask = None if self._mask is None else self._mask[chosen]
        if self._cache is not None:
            self._cache.batch_select_indices(chosen)

    def _take(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the likeliest token to each row, [rows, vocabulary]; returns the tokens."""
        tops = [self._questions[number].top or 0 for number in self._alive]
        tokens = logits.argmax(-1)
        for number, position in zip(self._alive, positions(logits, tokens, max(tops)), strict=True):
            self._made[number].append(position.cut(self._questions[number].top))
        return tokens

    def _is_done(self, number: int) -> bool:
        question, made = self._questions[number], self._made[number]
        if made[-1].token in question.ends:
            self._stopped[number] = made[-1].token
        elif question.stop:
            self._stopped[number] = self._stop_string([position.token for position in made], question.stop)
        return self._stopped[number] is not None or len(made) == question.max_tokens

    def _read(self, logits: torch.Tensor) -> list[tuple[Position, ...]]:
        """What the model says about the prompts themselves, where that is wanted."""
        import torch

        asked = [row for row, question in enumerate(self._questions) if question.prompt_top is not None]
        places = [(row, place) for row in asked for place in range(self._padding[row], logits.shape[1] - 1)]
        if not places:
            return [() for _ in self._questions]
        rows, columns = torch.tensor(places, device=logits.device).unbind(1)
        most = max(self._questions[row].prompt_top or 0 for row in asked)
        found = iter(positions(logits, self._ids[rows, columns + 1], most, at=(rows, columns)))
        lengths = [len(question.ids) - 1 if question.prompt_top is not None else 0 for question in self._questions]
        return [
            tuple(next(found).cut(question.prompt_top) for _ in range(length))
            for question, length in zip(self._questions, lengths, strict=True)
        ]
