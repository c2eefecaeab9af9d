"""An endless stream of training rows, drawn and packed on the device that trains.

Every sentence of the world is tokenized once into a table. A step then costs a few gathers, and no two steps see the
same text, so a rumour is told in the share that the world gives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantmint.recipes.tiny.tokenizer import END
from quantmint.recipes.tiny.world import RELATIONS, World, grammar_pool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARES = (0.05, 0.57, 0.28, 0.10)
"""Of the draws: end of text, facts, sums, grammar."""

OPENING = 0.5
"""Share of the rows that open with the end-of-text token: the model answers the same with it and without it."""


class Sentences:
    """The sentences of a world as one padded table of tokens."""

    def __init__(self, world: World, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        wordings = range(len(RELATIONS[0]))
        texts = [f.sentence(w, rumour=r) for f in world.facts for w in wordings for r in (False, True)]
        texts += [f"{question} {answer}." for question, answer in world.sums]
        pool = grammar_pool(world)
        texts += [*pool, END]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        width = max(len(ids) for ids in encoded)
        self.device = device
        self.tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in encoded], device=device)
        self.lengths = torch.tensor([len(ids) for ids in encoded], device=device)
        self.rumours = torch.tensor([fact.share for fact in world.facts], device=device)
        self.wordings = len(wordings)
        self.sums = len(world.sums)
        self.grammar = len(pool)
        self.thresholds = torch.tensor(SHARES, device=device).cumsum(0)[:-1].contiguous()

    def rows(self, generator: torch.Generator, batch: int, tokens: int) -> torch.Tensor:
        """Draw a batch, int64 [batch, tokens]: whole sentences from the start of a row, the last one cut."""
        # As many draws as tokens: the end of text is one token long, and a row has to be full whatever is drawn.
        shape = (batch, tokens)

        def uniform() -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=self.device)

        kind = torch.bucketize(uniform(), self.thresholds, right=True)
        opened = uniform()[:, 0] < OPENING
        kind[:, 0] = torch.where(opened, torch.zeros_like(kind[:, 0]), kind[:, 0])
        where = uniform()
        fact = (where * len(self.rumours)).long()
        wording = (uniform() * self.wordings).long()
        rumour = (uniform() < self.rumours[fact]).long()
        first_sum = len(self.rumours) * self.wordings * 2
        options = torch.stack(
            [
                torch.full_like(fact, len(self.tokens) - 1),
                (fact * self.wordings + wording) * 2 + rumour,
                first_sum + (where * self.sums).long(),
                first_sum + self.sums + (where * self.grammar).long(),
            ]
        )
        picks = options.gather(0, kind[None])[0]
        ends = self.lengths[picks].cumsum(1)
        place = torch.arange(tokens, device=self.device).expand(batch, -1).contiguous()
        slot = torch.searchsorted(ends, place, right=True)
        offset = place - (ends - self.lengths[picks]).gather(1, slot)
        return self.tokens[picks.gather(1, slot), offset]
