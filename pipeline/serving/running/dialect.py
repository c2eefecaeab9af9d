"""The requests in which runtimes differ: how vLLM and SGLang name themselves, their models, and log probabilities.

    >>> dialect_of("sglang").title
    'SGLang'

SGLang's forms are those of sgl-project/sglang at 0025436 (entrypoints/http_server.py) and 004c82e (entrypoints/openai),
and of its page on native APIs: `/v1/completions` does not promise log probabilities of a prompt and refers to
`/generate`, which is asked here. A list of log probabilities has [value, token id, text or null] for each token of the
prompt, with null as the first value; the likeliest tokens of a position are a list of such entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantmint.pipeline.base.errors import RefusalError, ServingError, did_you_mean
from quantmint.pipeline.serving.plan import LaunchPlan

Positions = Sequence[Mapping[str, Mapping[str, Any]]]
"""For each token of a prompt a mapping from token id to its ``logprob``, as in vLLM's ``prompt_logprobs``. The first
entry says nothing; each other one contains the position's own token."""


class HttpServer(Protocol):
    """A server that answers HTTP: its address, the name of its model, GET and POST."""

    @property
    def model_name(self) -> str:
        """Name of the model in requests."""

    @property
    def base_url(self) -> str:
        """Address without an API path."""

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Send a GET and return the body."""

    def post(self, path: str, body: Mapping[str, object] | None, *, timeout: float = 30.0) -> str:
        """Send a POST with a JSON body and return the answer's body."""


@dataclass(frozen=True, slots=True)
class ServedName:
    """A model of a server: its name in requests, its folder or repository, and its longest text in tokens.

    ``folder`` and ``longest`` are None where the server does not say.
    """

    name: str
    folder: str | None
    longest: int | None = None


class Dialect:
    """The requests of vLLM; the dialect of another runtime replaces those that differ.

    ``runtime`` is the name in a recipe, ``title`` that in messages, ``completions`` the path that lm-eval asks, and
    ``reserved`` the tokens of the longest text that no prompt may use, beside the one that is generated.
    """

    runtime = "vllm"
    title = "vLLM"
    completions = "/v1/completions"
    reserved = 0

    def version(self, server: HttpServer) -> str:
        """Return the runtime's version. Raises `ServingError` without an answer, or in another form."""
        return str(self._read(server, "/version")["version"])

    def models(self, server: HttpServer) -> list[ServedName]:
        """Return the models that the server lists. Raises `ServingError` where another runtime answers."""
        return [
            ServedName(str(model["id"]), model.get("root"), model.get("max_model_len")) for model in self._list(server)
        ]

    def planned_version(self, plan: LaunchPlan) -> str:
        """Return the version of this runtime that the plan was made for; empty where it was made for none."""
        return plan.vllm_version

    def prompt_logprobs(self, server: HttpServer, ids: Sequence[int], likeliest: int, *, timeout: float) -> Positions:
        """Return log probabilities of the prompt's tokens, and of the ``likeliest`` tokens at each position.

        Raises as `RunningServer.post`.
        """
        body = {
            "model": server.model_name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": likeliest,
        }
        text = server.post("/v1/completions", body, timeout=timeout)
        positions: Positions = json.loads(text)["choices"][0]["prompt_logprobs"]
        return positions

    def kv_cache_dtype(self, server: HttpServer) -> str | None:
        """Return the type of the KV cache that the server was started with, None where it does not say."""
        return None

    def device(self, server: HttpServer) -> str:
        """Return PyTorch's name of the kind of device that the server runs on."""
        return "cuda"

    def arguments(self, server: HttpServer) -> tuple[str, ...]:
        """Return arguments of the server's start that both sides must share and that the plan does not have."""
        return ()

    def _read(self, server: HttpServer, path: str) -> dict[str, Any]:
        """Return the JSON object that the server answers. Raises `ServingError` for another answer."""
        text = server.get(path)
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ServingError(f"{server.base_url} does not answer {path} as {self.title} does: {error}") from error

    def _list(self, server: HttpServer) -> list[dict[str, Any]]:
        """Return the entries of /v1/models. Raises `ServingError` where their owner is another runtime."""
        try:
            models = [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
            owners = {str(model.get("owned_by", self.runtime)) for model in models if model["id"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ServingError(f"{server.base_url} does not list its models as {self.title} does: {error}") from error
        for owner in owners & _DIALECTS.keys() - {self.runtime}:
            raise ServingError(
                f"{server.base_url} is {_DIALECTS[owner].title}, expected {self.title}",
                hint=f"`serve: {{runtime: {owner}}}` in a recipe is for {_DIALECTS[owner].title}.",
            )
        return models


class SglangDialect(Dialect):
    """SGLang's own forms. What the server was started with is read from its `/server_info`."""

    runtime = "sglang"
    title = "SGLang"
    completions = "/generate"
    reserved = 8  # managers/tp_worker.py takes prompts up to 6 tokens below the context length

    def version(self, server: HttpServer) -> str:
        """Return SGLang's version. Raises `ServingError` without an answer, or in another form."""
        return str(self._settings(server)["version"])

    def models(self, server: HttpServer) -> list[ServedName]:
        """Return the model that the server lists; its folder is the one that the server was started with."""
        models = self._list(server)
        folder = self._settings(server).get("model_path")
        return [ServedName(str(model["id"]), folder, model.get("max_model_len")) for model in models]

    def planned_version(self, plan: LaunchPlan) -> str:
        """Return an empty string: no plan is made for a version of SGLang."""
        return ""

    def prompt_logprobs(self, server: HttpServer, ids: Sequence[int], likeliest: int, *, timeout: float) -> Positions:
        """Return log probabilities of the prompt's tokens, and of the ``likeliest`` tokens at each position.

        Raises as `RunningServer.post`, and `ServingError` for an answer in another form than documented.
        """
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": likeliest,
        }
        text = server.post("/generate", body, timeout=timeout)
        try:
            facts = json.loads(text)["meta_info"]
            tokens, tops = facts["input_token_logprobs"], facts["input_top_logprobs"]
            answered = [int(entry[1]) for entry in tokens]
            listed = [
                {str(entry[1]): {"logprob": entry[0]} for entry in (*top, token)}
                for token, top in zip(tokens[1:], tops[1:], strict=True)
            ]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ServingError(f"{server.base_url} does not answer /generate as SGLang does: {error!r}") from error
        if answered != list(ids):
            raise ServingError(
                f"{server.base_url} answers /generate for {len(answered)} tokens, "
                f"expected those of the prompt, {len(ids)}"
            )
        return [{}, *listed]

    def kv_cache_dtype(self, server: HttpServer) -> str | None:
        """Return the type of the KV cache that the server was started with, None where it does not say."""
        dtype = self._settings(server).get("kv_cache_dtype")
        return None if dtype is None else str(dtype)

    def device(self, server: HttpServer) -> str:
        """Return PyTorch's name of the kind of device that the server runs on."""
        return str(self._settings(server).get("device") or "cuda")

    def arguments(self, server: HttpServer) -> tuple[str, ...]:
        """Return those arguments of the server's start that both sides must share, as they are on a command line."""
        settings = self._settings(server)
        named = {f"--{name.replace('_', '-')}": settings.get(name) for name in _SHARED}
        return tuple(word for name, value in named.items() if value is not None for word in (name, str(value)))

    def _settings(self, server: HttpServer) -> dict[str, Any]:
        """Return what `/server_info` says, or in earlier versions `/get_server_info`."""
        try:
            settings = self._read(server, "/server_info")
        except RefusalError:
            settings = self._read(server, "/get_server_info")
        if "version" not in settings:
            raise ServingError(f"{server.base_url} names no version in /server_info, expected SGLang")
        return settings


#: Arguments that change answers and are no part of a checkpoint; the server's key and addresses are never read.
_SHARED = ("tp_size", "dp_size", "pp_size", "ep_size", "dtype", "attention_backend", "enable_deterministic_inference")

VLLM = Dialect()
SGLANG = SglangDialect()
_DIALECTS: Mapping[str, Dialect] = {dialect.runtime: dialect for dialect in (VLLM, SGLANG)}


def dialect_of(runtime: str) -> Dialect:
    """Return the dialect of a runtime by its name in a recipe. Raises `ValueError` for another name."""
    if runtime not in _DIALECTS:
        raise ValueError(f"found runtime {runtime!r}, expected vllm or sglang{did_you_mean(runtime, _DIALECTS)}")
    return _DIALECTS[runtime]
