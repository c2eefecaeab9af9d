"""A batch answers as each of its prompts would alone, and as transformers generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.reference.greedy import answer
from pipeline.reference.model import Loaded, load
from pipeline.reference.questions import Answer, Question
from pipeline.reference.text import Text

PROMPTS = tuple(
    tuple(torch.randint(4, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (1, 5, 9, 9, 30, 2)
)


def ask(loaded: Loaded, text: Text, *questions: Question) -> list[Answer]:
    return answer(loaded, questions, text.stop_string)


def test_generation_is_what_transformers_generates(llama: Loaded, text: Text) -> None:
    found = ask(llama, text, *(Question(ids, max_tokens=6 + number) for number, ids in enumerate(PROMPTS)))
    for number, (ids, said) in enumerate(zip(PROMPTS, found, strict=True)):
        with torch.inference_mode():
            whole = llama.model.generate(
                torch.tensor([ids]), max_new_tokens=6 + number, do_sample=False, eos_token_id=None, pad_token_id=3
            )
        assert list(said.ids) == whole[0, len(ids) :].tolist()
        assert said.stopped is None
        assert said.positions == ()


@pytest.mark.parametrize("scheme", ["none", "ptpc_fp8"])
def test_a_batch_says_of_each_prompt_what_it_says_of_it_alone(
    llama: Loaded, text: Text, quantize: Any, scheme: str
) -> None:
    loaded = llama if scheme == "none" else load(quantize("llama", "compressed-tensors").folder, "cpu")
    questions = [Question(ids, max_tokens=n, prompt_top=2, top=3) for n, ids in enumerate(PROMPTS)]
    for question, said in zip(questions, ask(loaded, text, *questions), strict=True):
        (alone,) = ask(loaded, text, question)
        assert said.ids == alone.ids
        assert len(said.prompt) == len(question.ids) - 1
        assert len(said.positions) == question.max_tokens
        for one, other in zip((*said.prompt, *said.positions), (*alone.prompt, *alone.positions), strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_log_probabilities_are_those_of_one_forward(llama: Loaded, text: Text) -> None:
    (said,) = ask(llama, text, Question(PROMPTS[4], max_tokens=1, prompt_top=5, top=5))
    with torch.inference_mode():
        logprobs = llama.model(input_ids=torch.tensor([PROMPTS[4]])).logits[0].log_softmax(-1)
    for place, position in enumerate((*said.prompt, *said.positions)):
        expected = logprobs[place]
        assert position.logprob == pytest.approx(float(expected[position.token]), abs=1e-5)
        assert position.rank == int((expected > expected[position.token]).sum()) + 1
        assert [token for token, _ in position.top] == expected.topk(5).indices.tolist()
    assert said.positions[0].rank == 1


def test_an_answer_ends_at_a_token_or_a_string(llama: Loaded, text: Text) -> None:
    (free,) = ask(llama, text, Question(PROMPTS[2], max_tokens=8))
    by_token, by_string, other = ask(
        llama,
        text,
        Question(PROMPTS[2], max_tokens=8, ends=frozenset({free.ids[3]})),
        Question(PROMPTS[2], max_tokens=8, stop=("no such", text.decode([free.ids[2]]))),
        Question(PROMPTS[0], max_tokens=8),
    )
    assert by_token.stopped == free.ids[3]
    assert by_token.ids == free.ids[: free.ids.index(free.ids[3]) + 1]
    assert by_string.stopped == text.decode([free.ids[2]])
    assert by_string.ids == free.ids[: free.ids.index(free.ids[2]) + 1]
    assert len(other.ids) == 8


def test_the_cache_is_rounded(quantize: Any, text: Text) -> None:
    loaded = load(quantize("llama", "compressed-tensors").folder, "cpu")
    plain = Loaded(loaded.model, "cpu", {}, loaded.runtime)
    coarse = Loaded(loaded.model, "cpu", dict.fromkeys(loaded.kv_scales, (100.0, 100.0)), loaded.runtime)
    question = Question(PROMPTS[4], prompt_top=0)
    one, other, third = (ask(which, text, question)[0].prompt for which in (loaded, plain, coarse))
    assert [p.logprob for p in one] != [p.logprob for p in other]

    def apart(a: Any, b: Any) -> float:
        return sum(abs(x.logprob - y.logprob) for x, y in zip(a, b, strict=True))

    assert apart(one, other) < apart(third, other)
