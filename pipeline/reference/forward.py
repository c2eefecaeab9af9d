"""One pass of a batch through the model, and what its logits say about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reference.model import Loaded
from pipeline.reference.questions import Position

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 26  # logits that are looked at at once


def padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Prompts as rows that end together: ids, mask (None where no row is padded) and places, each [rows, tokens]."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    padding = torch.tensor([[width - len(prompt)] for prompt in prompts], device=device)
    columns = torch.arange(width, device=device).unsqueeze(0)
    mask = (columns >= padding).long() if bool(padding.any()) else None
    return ids, mask, (columns - padding).clamp(min=0)


def forward(
    loaded: Loaded,
    ids: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    places: torch.Tensor,
    cache: Any,
    last_only: bool = False,
) -> torch.Tensor:
    """Logits, [rows, tokens, vocabulary]; of the last token alone where no other is wanted."""
    found: torch.Tensor = loaded.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=places,
        past_key_values=cache,
        use_cache=cache is not None,
        logits_to_keep=1 if last_only else 0,
    ).logits
    return found


def positions(
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
