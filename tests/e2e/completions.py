"""One request to a server's completions API."""

from __future__ import annotations

import http.client
import json

from pipeline.serving.running.server import HOST, Server


def greedy_logprobs(server: Server, prompt: str, tokens: int = 4) -> tuple[float, ...]:
    """Log probabilities of the greedy continuation, rounded to what float32 printing keeps."""
    body = {
        "model": server.model_name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
        "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return tuple(round(float(value), 4) for value in answer["choices"][0]["logprobs"]["token_logprobs"])
