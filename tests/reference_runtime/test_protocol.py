from __future__ import annotations

from typing import Any

import pytest

from pipeline.reference.protocol import RequestError, read, write
from pipeline.reference.questions import Answer, Position, Question
from pipeline.reference.text import Text


def understood(text: Text, **fields: Any) -> Any:
    body = {"model": "m", "prompt": [5, 6, 7], "temperature": 0, **fields}
    return read(body, text, model="m", max_model_len=64, vocabulary=512)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("w5 w6", [(5, 6)]),
        (["w5", "w6 w7"], [(5,), (6, 7)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_prompts_are_text_or_tokens_one_or_several(text: Text, prompt: Any, ids: Any) -> None:
    assert [question.ids for question in understood(text, prompt=prompt).questions] == ids


def test_what_lm_eval_asks_for_log_likelihoods(text: Text) -> None:
    request = understood(text, max_tokens=1, logprobs=1, seed=1234, echo=True)
    assert request.questions == (Question((5, 6, 7), max_tokens=1, prompt_top=1, top=1, ends=frozenset({2})),)
    position = Position(6, -0.5, 1, ((6, -0.5),))
    other = Position(7, -2.0, 3, ((9, -0.25),))
    made = Position(8, -0.1, 1, ((8, -0.1),))
    (choice,) = write(request, [Answer((8,), (position, other), (made,), None)], text)["choices"]
    assert choice["text"] == "w5 w6 w7 w8"
    assert choice["logprobs"] == {
        "text_offset": [0, 2, 4, 6],
        "token_logprobs": [None, -0.5, -2.0, -0.1],
        "tokens": ["w5", "w6", "w7", "w8"],
        "top_logprobs": [None, {"w6": -0.5}, {"w7": -2.0, "w9": -0.25}, {"w8": -0.1}],
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["prompt_logprobs"]) == ("length", None, None)


def test_prompt_log_probabilities_have_vllm_s_form(text: Text) -> None:
    request = understood(text, max_tokens=1, prompt_logprobs=1)
    position, other = Position(6, -0.5, 1, ((6, -0.5),)), Position(7, float("-inf"), 3, ((9, -0.25),))
    (choice,) = write(request, [Answer((8,), (position, other), (), None)], text)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "w6"}},
        {
            "7": {"logprob": -9999.0, "rank": 3, "decoded_token": "w7"},
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": "w9"},
        },
    ]
    assert choice["logprobs"] is None


def test_tokens_may_be_named_by_their_numbers(text: Text) -> None:
    request = understood(text, max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    (choice,) = write(request, [Answer((8,), (), (Position(8, -0.1, 1, ()),), None)], text)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:8"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:8": -0.1}]


def test_what_a_stop_string_begins_is_left_out(text: Text) -> None:
    request = understood(text, max_tokens=4, stop="w9")
    (choice,) = write(request, [Answer((8, 9), (), (), "w9")], text)["choices"]
    assert choice["text"].strip() == "w8"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "w9")


def test_the_end_of_sequence_ends_unless_it_is_ignored(text: Text) -> None:
    assert understood(text).questions[0].ends == {2}
    assert understood(text, ignore_eos=True).questions[0].ends == frozenset()
    request = understood(text)
    (choice,) = write(request, [Answer((8, 2), (), (), 2)], text)["choices"]
    assert (choice["text"].strip(), choice["finish_reason"], choice["stop_reason"]) == ("w8", "stop", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, "temperature: found 0.7, expected 0: answers here are greedy"),
        ({"temperature": None}, "temperature: found none, which means 1, expected 0"),
        ({"n": 2}, "n: found 2, expected 1"),
        ({"stream": True}, "stream: found True, expected False"),
        ({"presence_penalty": 0.5}, "presence_penalty: found 0.5, expected 0"),
        ({"max_token": 5}, 'max_token: the reference runtime has no such field (did you mean "max_tokens"?)'),
        ({"max_tokens": -1}, "max_tokens: found -1, expected an integer from 0 to 64"),
        ({"max_tokens": 62}, "prompt: found 3 tokens and 62 to add, expected up to 64 together"),
        ({"logprobs": True}, "logprobs: found True, expected an integer"),
        ({"prompt": []}, "prompt: found no tokens, expected at least one"),
        ({"prompt": [1, "w5"]}, "prompt: expected text or token ids, or a list of either"),
        ({"prompt": None}, "prompt: expected text or token ids"),
        ({"prompt": [5, 512]}, "prompt: found token 512, expected 0 to 511"),
        ({"stop": [1]}, "stop: found [1], expected a string or a list of strings"),
        ({"echo": 1}, "echo: found 1, expected true or false"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_name(text: Text, fields: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        understood(text, **fields)
    assert message in str(refused.value)
    assert refused.value.status == 400
    assert refused.value.to_json()["error"]["param"] == refused.value.field is not None


def test_fields_without_effect_are_taken(text: Text) -> None:
    request = understood(text, seed=3, top_p=0.9, n=1, stream=False, user="me", presence_penalty=0.0, suffix=None)
    assert request.questions[0].max_tokens == 16


def test_another_model_is_not_here(text: Text) -> None:
    with pytest.raises(RequestError, match="expected 'm'") as refused:
        understood(text, model="other")
    assert refused.value.status == 404
