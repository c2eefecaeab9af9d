"""Answering a batch of questions: one pass over the prompts, then the likeliest token, again and again.

Prompts of different lengths are padded on their left, so that all of them end at the same place; positions and the mask
leave the padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reference.cache import kv_cache
from pipeline.reference.model import Loaded
from pipeline.reference.questions import Answer, Position, Question

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 26  # logits that are looked at at once

StopString = Callable[[Sequence[int], Sequence[str]], str | None]
"""Which of some strings is in the text of an answer's tokens."""


def answer(loaded: Loaded, questions: Sequence[Question], stop_string: StopString) -> list[Answer]:
    """Answer questions together, in their order. Memory is that of the longest for all of them."""
    import torch

    with torch.inference_mode():
        return _Batch(loaded, questions, stop_string).run()


class _Batch:
    """Rows are questions that go on; ``_alive`` are their numbers."""

    def __init__(self, loaded: Loaded, questions: Sequence[Question], stop_string: StopString) -> None:
        import torch

        self._loaded, self._questions, self._stop_string = loaded, questions, stop_string
        self._alive = list(range(len(questions)))
        self._made: list[list[Position]] = [[] for _ in questions]
        self._stopped: list[str | int | None] = [None for _ in questions]
        width = max(len(question.ids) for question in questions)
        self._padding = [width - len(question.ids) for question in questions]
        rows = [[0] * pad + list(question.ids) for pad, question in zip(self._padding, questions, strict=True)]
        self._ids = torch.tensor(rows, device=loaded.device)
        padding = torch.tensor(self._padding, device=loaded.device).unsqueeze(1)
        columns = torch.arange(width, device=loaded.device).unsqueeze(0)
        self._mask = (columns >= padding).long() if any(self._padding) else None
        self._positions = (columns - padding).clamp(min=0)
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
        """Logits, [rows, tokens, vocabulary]; of the last token alone where no other is wanted."""
        shared: dict[str, Any] = {"attention_mask": self._mask, "position_ids": self._positions}
        found: torch.Tensor = self._loaded.model(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=self._cache is not None,
            logits_to_keep=1 if last_only else 0,
            **shared,
        ).logits
        return found

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        self._positions = self._positions[:, -1:] + 1
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
        self._positions = self._positions[chosen]
        self._mask = None if self._mask is None else self._mask[chosen]
        if self._cache is not None:
            self._cache.batch_select_indices(chosen)

    def _take(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the likeliest token to each row, [rows, vocabulary]; returns the tokens."""
        tops = [self._questions[number].top or 0 for number in self._alive]
        tokens = logits.argmax(-1)
        for number, position in zip(self._alive, _positions(logits, tokens, max(tops)), strict=True):
            self._made[number].append(_cut(position, self._questions[number].top))
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
        found = iter(_positions(logits, self._ids[rows, columns + 1], most, at=(rows, columns)))
        lengths = [len(question.ids) - 1 if question.prompt_top is not None else 0 for question in self._questions]
        return [
            tuple(_cut(next(found), question.prompt_top) for _ in range(length))
            for question, length in zip(self._questions, lengths, strict=True)
        ]


def _positions(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, *, at: tuple[torch.Tensor, ...] | None = None
) -> list[Position]:
    """Look tokens [n] up in logits [n, vocabulary], or in those ``at`` some places of a larger tensor."""
    found: list[Position] = []
    step = max(_CHUNK // logits.shape[-1], 1)
    for start in range(0, len(tokens), step):
        chunk = slice(start, start + step)
        chosen = logits[chunk] if at is None else logits[tuple(index[chunk] for index in at)]
        logprobs, wanted = chosen.float().log_softmax(-1), tokens[chunk].unsqueeze(1)
        values = logprobs.gather(1, wanted)
        ranks = (logprobs > values).sum(-1) + 1
        best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
        columns = (wanted[:, 0], values[:, 0], ranks, best.indices, best.values)
        for token, value, rank, ids, likeliest in zip(*(column.tolist() for column in columns), strict=True):
            found.append(Position(token, value, rank, tuple(zip(ids, likeliest, strict=True))))
    return found


def _cut(position: Position, top: int | None) -> Position:
    wanted = top or 0
    if len(position.top) == wanted:
        return position
    return Position(position.token, position.logprob, position.rank, position.top[:wanted])
