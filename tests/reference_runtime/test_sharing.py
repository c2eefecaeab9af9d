"""What prompts share is computed once, and changes nothing that is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.reference.greedy import answer
from pipeline.reference.model import Loaded, load
from pipeline.reference.questions import Question
from pipeline.reference.sharing import Family, families, read_shared
from pipeline.reference.text import Text


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


CONTEXTS = (prompt(12, 1), prompt(20, 2), prompt(9, 3))
CHOICES = [(*context, *prompt(1 + n % 3, 10 * n + k)) for k, context in enumerate(CONTEXTS) for n in range(4)]


def test_prompts_that_begin_alike_are_a_family() -> None:
    prompts = [(1, 2, 3, 4), (9, 9, 9), (1, 2, 3, 5, 6), (1, 2, 3, 4), (7, 8)]
    assert families(prompts) == [Family((1, 2, 3), (0, 3, 2)), Family((7,), (4,)), Family((9, 9), (1,))]


def test_every_member_keeps_a_token_of_its_own() -> None:
    assert families([(1, 2, 3), (1, 2, 3, 4), (1, 2, 3)]) == [Family((1, 2), (0, 2, 1))]


def test_little_in_common_is_no_family() -> None:
    assert [family.members for family in families([(1, 2, 3, 4, 5, 6), (1, 2, 4, 4, 4, 4)])] == [(0,), (1,)]


@pytest.mark.parametrize("name", ["llama", "gemma3-text", "mixtral", "deepseek-v3"])
def test_an_answer_is_that_of_the_prompt_alone(models: Any, quantize: Any, text: Text, name: str) -> None:
    cached = name == "llama"
    loaded = load(quantize(name, "compressed-tensors").folder if cached else models(name), "cpu")
    assert bool(loaded.kv_scales) is cached
    questions = [Question(ids, max_tokens=1, prompt_top=n % 3, top=2) for n, ids in enumerate(CHOICES)]
    together = answer(loaded, questions, text.stop_string)
    assert read_shared(loaded, questions) is not None
    for question, said in zip(questions, together, strict=True):
        (alone,) = answer(loaded, [question], text.stop_string)
        assert said.ids == alone.ids
        assert len(said.prompt) == len(question.ids) - 1
        for one, other in zip((*said.prompt, *said.positions), (*alone.prompt, *alone.positions), strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_prompts_without_a_common_beginning_are_read_as_they_are(llama: Loaded) -> None:
    assert read_shared(llama, [Question(prompt(9, n), prompt_top=1) for n in range(4)]) is None
    assert read_shared(llama, [Question((5,), prompt_top=1), Question((5, 6), prompt_top=1)]) is None
