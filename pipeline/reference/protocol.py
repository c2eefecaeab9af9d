"""OpenAI's completions, in vLLM's form: what a request asks, and the answer as JSON.

Greedy answers alone: a field that asks for something else is refused by its name, and none is passed over that would
have changed the answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pipeline.recipe.faults import did_you_mean
from pipeline.reference.questions import Answer, Position, Question
from pipeline.reference.text import Text

_MOST = 1024  # likeliest tokens of a position
_PROMPTS = 4096  # of a request
_LEAST = -9999.0  # instead of minus infinity, which JSON has not
# Fields that choose among tokens at random, which nothing here does, or that only name who asks.
_WITHOUT_EFFECT = frozenset({"seed", "top_p", "top_k", "min_p", "user", "request_id"})
# Fields with the one value, beside null, that asks for nothing special.
_NEUTRAL: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "stream": False, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1, "logit_bias": {}, "stop_token_ids": [], "min_tokens": 0, "skip_special_tokens": True,
    "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "use_beam_search": False,
}  # fmt: skip
_READ = frozenset(
    {
        "model", "prompt", "max_tokens", "temperature", "stop", "echo", "logprobs", "prompt_logprobs",
        "return_tokens_as_token_ids", "ignore_eos", "add_special_tokens",
    }
)  # fmt: skip


class RequestError(Exception):
    """A request that is not answered: its HTTP status, and the field that is at fault."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status

    def to_json(self) -> dict[str, Any]:
        """The body that OpenAI's clients expect."""
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(self.status, "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}}


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was understood: ``texts`` are its prompts, and ``echo`` puts them before the answers."""

    model: str
    questions: tuple[Question, ...]
    texts: tuple[str, ...]
    echo: bool
    as_ids: bool
    shows_prompt: bool


def read(body: Any, text: Text, *, model: str, max_model_len: int, vocabulary: int) -> Request:
    """Understand the body of a request. Raises `RequestError`."""
    if not isinstance(body, dict):
        raise RequestError("expected a JSON object")
    _refuse_unknown(body)
    if body.get("model") not in (None, model):
        raise RequestError(f"found model {body['model']!r}, expected {model!r}", field="model", status=404)
    temperature = body.get("temperature")
    if not _is_number(temperature) or temperature != 0:
        found = "none, which means 1" if temperature is None else repr(temperature)
        raise RequestError(f"temperature: found {found}, expected 0: answers here are greedy", field="temperature")
    echo, special = _flag(body, "echo", False), _flag(body, "add_special_tokens", True)
    top, prompt_top = _count(body, "logprobs", _MOST), _count(body, "prompt_logprobs", _MOST)
    max_tokens = _count(body, "max_tokens", max_model_len)
    max_tokens = 16 if max_tokens is None else max_tokens
    shows_prompt = prompt_top is not None
    if echo and top is not None:
        prompt_top = max(top, prompt_top or 0)
    ends = frozenset() if _flag(body, "ignore_eos", False) else text.ends
    stop, questions, texts = _stop(body.get("stop")), [], []
    for prompt in _prompts(body.get("prompt")):
        ids = text.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else tuple(prompt)
        _check_prompt(ids, max_tokens, max_model_len, vocabulary)
        questions.append(Question(ids, max_tokens, prompt_top, top, ends, stop))
        if echo:
            texts.append(prompt if isinstance(prompt, str) else text.decode(ids))
    as_ids = _flag(body, "return_tokens_as_token_ids", False)
    return Request(model, tuple(questions), tuple(texts), echo, as_ids, shows_prompt)


def write(request: Request, answers: Sequence[Answer], text: Text) -> dict[str, Any]:
    """The answer to a request."""
    read_tokens = sum(len(question.ids) for question in request.questions)
    made = sum(len(answer.ids) for answer in answers)
    choices = [
        _choice(number, request, question, answer, text)
        for number, (question, answer) in enumerate(zip(request.questions, answers, strict=True))
    ]
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": {"prompt_tokens": read_tokens, "completion_tokens": made, "total_tokens": read_tokens + made},
    }


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    for field, value in body.items():
        if field in _READ or field in _WITHOUT_EFFECT or value is None:
            continue
        if field not in _NEUTRAL:
            hint = did_you_mean(field, [*_READ, *_NEUTRAL])
            raise RequestError(f"{field}: the reference runtime has no such field{hint}", field=field)
        if value != _NEUTRAL[field]:
            raise RequestError(
                f"{field}: found {value!r}, expected {_NEUTRAL[field]!r}: the reference runtime has nothing else",
                field=field,
            )


def _flag(body: Mapping[str, Any], field: str, default: bool) -> bool:
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{field}: found {value!r}, expected true or false", field=field)
    return value


def _count(body: Mapping[str, Any], field: str, most: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise RequestError(f"{field}: found {value!r}, expected an integer from 0 to {most}", field=field)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stop(found: Any) -> tuple[str, ...]:
    strings = [found] if isinstance(found, str) else found or []
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise RequestError(f"stop: found {found!r}, expected a string or a list of strings", field="stop")
    return tuple(strings)


def _prompts(found: Any) -> list[str | list[int]]:
    several = found if isinstance(found, list) and found and not _is_token(found[0]) else [found]
    if len(several) > _PROMPTS:
        raise RequestError(f"prompt: found {len(several)} prompts, expected up to {_PROMPTS}", field="prompt")
    for prompt in several:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_token, prompt))):
            raise RequestError("prompt: expected text or token ids, or a list of either", field="prompt")
    return several


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_prompt(ids: Sequence[int], max_tokens: int, max_model_len: int, vocabulary: int) -> None:
    if not ids:
        raise RequestError("prompt: found no tokens, expected at least one", field="prompt")
    strange = next((token for token in ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise RequestError(f"prompt: found token {strange}, expected 0 to {vocabulary - 1}", field="prompt")
    if len(ids) + max_tokens > max_model_len:
        raise RequestError(
            f"prompt: found {len(ids)} tokens and {max_tokens} to add, expected up to {max_model_len} together",
            field="prompt",
        )


def _choice(number: int, request: Request, question: Question, answer: Answer, text: Text) -> dict[str, Any]:
    words = text.added(question.ids, answer.ids)
    if isinstance(answer.stopped, str):
        words = words[: words.index(answer.stopped)] if answer.stopped in words else words
    logprobs = None
    if question.top is not None:
        read_ids = question.ids if request.echo else ()
        before: list[Position | None] = [None, *answer.prompt] if request.echo else []
        logprobs = _logprobs((*read_ids, *answer.ids), [*before, *answer.positions], question.top, request.as_ids, text)
    prompt_logprobs = None
    if request.shows_prompt:
        prompt_logprobs = [None, *(_listed(position, question.prompt_top or 0, text) for position in answer.prompt)]
    return {
        "index": number,
        "text": (request.texts[number] if request.echo else "") + words,
        "logprobs": logprobs,
        "finish_reason": "length" if answer.stopped is None else "stop",
        "stop_reason": answer.stopped if isinstance(answer.stopped, str) else None,
        "prompt_logprobs": prompt_logprobs,
    }


def _logprobs(
    ids: Sequence[int], positions: Sequence[Position | None], top: int, as_ids: bool, text: Text
) -> dict[str, Any]:
    name = (lambda token: f"token_id:{token}") if as_ids else text.token
    tokens = [name(token) for token in ids]
    offsets = [0, *accumulate(map(len, tokens))][:-1]

    def likeliest(position: Position) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in _likeliest(position, top):
            # Two tokens may have one text: the likelier stands for both.
            found[name(token)] = max(value, found.get(name(token), _LEAST))
        return found

    return {
        "text_offset": offsets,
        "token_logprobs": [None if position is None else max(position.logprob, _LEAST) for position in positions],
        "tokens": tokens,
        "top_logprobs": [None if position is None else likeliest(position) for position in positions],
    }


def _likeliest(position: Position, top: int) -> list[tuple[int, float]]:
    """The token itself and the likeliest, without doubles."""
    return list({position.token: position.logprob, **dict(position.top[:top])}.items())


def _listed(position: Position, top: int, text: Text) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(position.top[:top], start=1)} | {
        position.token: position.rank
    }
    return {
        str(token): {"logprob": max(value, _LEAST), "rank": ranks[token], "decoded_token": text.token(token)}
        for token, value in _likeliest(position, top)
    }
