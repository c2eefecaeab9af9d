"""lm-eval's client of a completions server, as we need it: it counts, and it remembers what it sent.

Only the process that runs lm-eval imports this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

# Parts of a fast tokenizer's state that only a call's padding and truncation depend on, and no text's tokens.
_OF_A_CALL = ("padding", "truncation")


class TokenizerFacts:
    """Facts on a model's tokenizer: a mixin for lm-eval's models, which have ``tokenizer`` and ``chat_template``."""

    tokenizer: Any
    chat_template: Callable[[bool], Any]

    def begins_with_bos(self) -> bool:
        """Return whether the tokenizer adds its BOS before a text, and no other special token.

        vLLM then adds it to a prompt that comes as text; prompts that come as token ids must include it.
        """
        bos = self.tokenizer.bos_token_id
        plain = self.tokenizer("a", add_special_tokens=False).input_ids
        return bos is not None and self.tokenizer("a").input_ids == [bos, *plain]

    def tokenizer_digest(self) -> str:
        """Return the SHA-256 of what turns text into tokens; the saved padding and truncation do not change it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            state: Any = sorted(self.tokenizer.get_vocab().items())
        else:
            state = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _OF_A_CALL}
        return _sha256(json.dumps(state, sort_keys=True))

    def template_digest(self) -> str:
        """Return the SHA-256 of the chat template that prompts are written in."""
        return _sha256(str(self.chat_template(True)))


class CountingClient(TokenizerFacts, LocalCompletionsAPI):  # type: ignore[misc]
    """lm-eval's `local-completions` that counts requests: `expect` gets the number to come, `done` the number answered.

    `temperatures` collects the temperatures that generation requests really had, whatever tasks and arguments say.
    `full` counts prompts that leave no token of the server's length unused: lm-eval cuts a longer prompt at its
    beginning, without a warning for generated text.
    """

    def __init__(
        self, arguments: Mapping[str, Any], expect: Callable[[int], None], done: Callable[[int], None]
    ) -> None:
        super().__init__(**arguments)
        self.temperatures: set[float] = set()
        self.full = 0
        self._expect = expect
        self._done = done
        self._by_document = False
        self._failure: Exception | None = None

    def loglikelihood(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """Announce the requests to `expect`, then do as lm-eval's method."""
        self._expect(len(requests))
        return super().loglikelihood(requests, *args, **options)

    def generate_until(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """Announce the requests to `expect`, then do as lm-eval's method."""
        self._expect(len(requests))
        return super().generate_until(requests, *args, **options)

    def loglikelihood_rolling(self, requests: list[Any], *args: Any, **options: Any) -> list[float]:
        """Do as lm-eval's method, one document at a time, and count documents instead of HTTP requests."""
        self._expect(len(requests))
        found: list[float] = []
        self._by_document = True
        try:
            for request in requests:
                found += super().loglikelihood_rolling([request], *args, **options)
                self._done(1)
        finally:
            self._by_document = False
        return found

    def model_call(self, messages: list[Any], **options: Any) -> Any:
        """Send one HTTP request with several prompts and count them; lm-eval calls this at a concurrency of 1."""
        answer = super().model_call(messages, **options)
        self._count(messages)
        return answer

    async def amodel_call(self, session: Any, sem: Any, messages: list[Any], **options: Any) -> Any:
        """Send one HTTP request with several prompts and count them; lm-eval calls this at a higher concurrency.

        Raises the error of the first request that failed for good, also for requests that only failed because lm-eval
        then closed the session.
        """
        try:
            answer = await super().amodel_call(session, sem, messages, **options)
        except Exception as error:
            # The session is closed under the requests in flight once one of them has failed for good: that is the news,
            # whatever these come to see of it. The loop tells of them last, so they are what a log ends with.
            if session.closed:
                raise self._failure or error from None
            self._failure = error
            raise
        self._count(messages)
        return answer

    def _count(self, messages: list[Any]) -> None:
        if not self._by_document:
            self._done(len(messages))

    def _create_payload(self, *args: Any, **options: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(*args, **options)
        room = int(self.max_length)
        if options.get("generate"):
            self.temperatures.add(float(payload["temperature"]))
            room -= int(payload["max_tokens"])
        if not self._by_document:  # a document is cut into windows that are full
            self.full += sum(len(prompt) >= room for prompt in payload["prompt"])
        return payload


class SglangClient(CountingClient):
    """`CountingClient` of SGLang's native `/generate`, which scores prompts; all prompts are lists of token ids.

    lm-eval has such a model too, "sglang-generate", whose answer to whether a continuation is the likeliest is inverted
    (x[1] != y[0][1] in lm-eval 0.4).
    """

    def _create_payload(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the request in SGLang's form. Settings besides OpenAI's are passed on as sampling parameters."""
        payload = super()._create_payload(*args, **options)
        ids = payload.pop("prompt")
        if not options.get("generate"):
            return {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 1,
            }
        for name in ("model", "seed"):  # the server has one model, and draws nothing at temperature 0
            payload.pop(name, None)
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": payload.pop("max_tokens"), **payload}}

    @staticmethod
    def parse_logprobs(outputs: Any, tokens: Any = None, ctxlens: Any = None, **_: Any) -> list[tuple[float, bool]]:
        """Return (log probability, whether it is the likeliest) of each prompt's continuation.

        It begins at token ``ctxlens[i]`` of prompt i. Raises `ValueError` where the tokens are not the prompt's.
        """
        scores = []
        answers = outputs if isinstance(outputs, list) else [outputs]
        for answer, prompt, start in zip(answers, tokens, ctxlens, strict=True):
            facts = answer["meta_info"]
            scored, tops = facts["input_token_logprobs"], facts["input_top_logprobs"]
            if [entry[1] for entry in scored] != list(prompt):
                raise ValueError(f"/generate answered for {len(scored)} tokens, expected the prompt's {len(prompt)}")
            pairs = list(zip(scored[start:], tops[start:], strict=True))
            # By value: equal logits have more than one likeliest token.
            scores.append((sum(entry[0] for entry, _ in pairs), all(entry[0] >= top[0][0] for entry, top in pairs)))
        return scores

    @staticmethod
    def parse_generations(outputs: Any, **_: Any) -> list[str]:
        """Return the text of each answer, in the order of the prompts."""
        return [str(answer["text"]) for answer in (outputs if isinstance(outputs, list) else [outputs])]


def client_of(runtime: str) -> type[CountingClient]:
    """Return the client for a runtime's form of requests, by the runtime's name in a recipe."""
    return {"vllm": CountingClient, "sglang": SglangClient}[runtime]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
