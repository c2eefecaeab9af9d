"""A stand-in for SGLang that answers by a model of transformers in SGLang's documented forms.

Forms: sgl-project/sglang, commit 0025436 (`entrypoints/http_server.py`: /health, /get_model_info, /get_server_info,
/generate), commit 004c82e (`entrypoints/openai/protocol.py`: ModelCard of /v1/models, owned_by "sglang") and
`docs/basic_usage/native_api`. What SGLang refuses is refused: an unknown field of a request, and a prompt of more than
context_length - 6 tokens (`managers/tp_worker.py`).

``with SglangServer(model, folder) as server`` listens in a thread; ``asked`` has (path, body) of every request.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_REQUEST = {
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
}
_SAMPLING = {"max_new_tokens", "temperature", "stop"}


class SglangServer:
    """``folder`` is what the server says it serves, ``settings`` replace what /server_info says."""

    def __init__(
        self, model: Any, tokenizer: Any, folder: Path, *, name: str = "model", owner: str = "sglang", **settings: Any
    ) -> None:
        self.model, self.tokenizer, self.name, self.owner = model, tokenizer, name, owner
        self.settings: dict[str, Any] = {
            "model_path": str(folder),
            "served_model_name": name,
            "context_length": 512,
            "kv_cache_dtype": "auto",
            "dtype": "auto",
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "attention_backend": "torch_native",
            "api_key": None,
            "max_total_num_tokens": 16384,
            "internal_states": [{}],
            "version": "0.5.9",
            **settings,
        }
        self.earlier = False  # /server_info is not there yet
        self.asked: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append((self.path, None))
                self._send(*outer.got(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                self._send(*(outer.generated(body) if self.path == "/generate" else (404, {"detail": "Not Found"})))

            def _send(self, status: int, body: object) -> None:
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SglangServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def bodies(self) -> list[Any]:
        """The bodies of all requests to /generate."""
        return [body for path, body in self.asked if path == "/generate"]

    def got(self, path: str) -> tuple[int, Any]:
        info = {"/get_server_info": self.settings, **({} if self.earlier else {"/server_info": self.settings})}
        card = {
            "id": self.name,
            "object": "model",
            "created": 1,
            "owned_by": self.owner,
            "root": self.name,  # SGLang's root is the name, not the folder
            "parent": None,
            "max_model_len": self.settings["context_length"],
        }
        answers = {"/health": None, "/v1/models": {"object": "list", "data": [card]}, **info}
        return (200, answers[path]) if path in answers else (404, {"detail": "Not Found"})

    def generated(self, body: dict[str, Any]) -> tuple[int, Any]:
        unknown = (body.keys() - _REQUEST) | (body["sampling_params"].keys() - _SAMPLING)
        prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        longest = max(map(len, prompts))
        if unknown or longest > self.settings["context_length"] - 6:
            return 400, {"error": {"message": f"unexpected {sorted(unknown)}, or {longest} tokens are too many"}}
        with self._lock, torch.inference_mode():
            answers = [self._answer(prompt, body) for prompt in prompts]
        return 200, answers if isinstance(body["input_ids"][0], list) else answers[0]

    def _answer(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        logprobs = self.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        new = [int(logprobs[-1].argmax())]
        if sampling["max_new_tokens"] > 1:
            given = torch.tensor([prompt])
            limits = {"max_new_tokens": sampling["max_new_tokens"], "do_sample": False}
            answered = self.model.generate(given, attention_mask=torch.ones_like(given), **limits)
            new = answered[0, len(prompt) :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        for stop in sampling.get("stop") or []:
            text = text.partition(stop)[0]
        facts: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(new)}
        if body.get("return_logprob"):
            assert body["logprob_start_len"] == 0
            values = [None, *(float(logprobs[at, token]) for at, token in enumerate(prompt[1:]))]
            facts["input_token_logprobs"] = [[value, token, None] for value, token in zip(values, prompt, strict=True)]
            top = logprobs[:-1].topk(body["top_logprobs_num"], dim=-1)
            rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            entries = [[[value, token, None] for value, token in zip(*row, strict=True)] for row in rows]
            facts["input_top_logprobs"] = [None, *entries]
        return {"text": text, "output_ids": new, "meta_info": facts}
