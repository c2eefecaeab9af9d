"""A server of somebody else: what is asked of it, and what it must not be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.endpoint import EndpointLauncher, endpoint_url
from quantmint.pipeline.serving.running.server import RunningServer


class Endpoint:
    """A server in this process; every answer can be changed."""

    def __init__(self, model: Path) -> None:
        self.health = 200
        self.card: dict[str, Any] = {"id": "m", "root": str(model)}
        self.version = "0.32.0"
        self.asked: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = {
                    "/health": "",
                    "/version": json.dumps({"version": outer.version}),
                    "/v1/models": json.dumps({"data": [outer.card]}),
                }.get(self.path)
                outer.asked.add(self.path)
                self.send_response(outer.health if self.path == "/health" else 200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *_: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def endpoint(tiny_llama: Path) -> Iterator[Endpoint]:
    running = Endpoint(tiny_llama)
    yield running
    running.http.shutdown()
    running.http.server_close()


def plan_for(model: Path, *more: str, version: str = "0.32.0") -> LaunchPlan:
    argv = ("vllm", "serve", str(model), *more)
    return LaunchPlan({}, argv, "m", 1, (), vllm_version=version)


def take(endpoint: Endpoint, plan: LaunchPlan, folder: Path) -> tuple[list[str], RunningServer]:
    said: list[str] = []
    with EndpointLauncher(endpoint.url).deploy(plan, (), folder / "logs", notify=said.append) as running:
        running.check()
        return said, running.servers[0]


def test_the_right_server_is_taken_without_a_word(endpoint: Endpoint, tiny_llama: Path, tmp_path: Path) -> None:
    said, server = take(endpoint, plan_for(tiny_llama), tmp_path)
    assert said == []
    assert (server.base_url, server.model_name, server.log_path) == (endpoint.url, "m", None)
    assert not (tmp_path / "logs").exists()
    assert endpoint.asked >= {"/health", "/version", "/v1/models"}
    assert server.get("/health") == ""  # it still runs


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"card": {"id": "other", "root": "/models/other"}}, "it serves other, expected m"),
        ({"card": {"id": "m", "root": "/"}}, "it serves /, expected "),
    ],
)
def test_a_wrong_server_is_refused(
    endpoint: Endpoint, tiny_llama: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    for name, value in change.items():
        setattr(endpoint, name, value)
    with pytest.raises(ServingError, match=complaint):
        take(endpoint, plan_for(tiny_llama), tmp_path)


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"card": {"id": "m", "root": "/far/away"}}, "whose files cannot be checked from this machine"),
        ({"card": {"id": "m"}}, "a folder that it does not name"),
        ({"version": "0.31.0"}, "it runs vLLM 0.31.0, but the plan was made for 0.32.0"),
    ],
)
def test_what_cannot_be_proven_is_a_warning(
    endpoint: Endpoint, tiny_llama: Path, tmp_path: Path, change: dict[str, Any], doubt: str
) -> None:
    for name, value in change.items():
        setattr(endpoint, name, value)
    (said,), _ = take(endpoint, plan_for(tiny_llama), tmp_path)
    assert said.startswith(f"warning: {endpoint.url}: ")
    assert doubt in said


def test_a_server_that_wants_a_key_is_refused(endpoint: Endpoint, tiny_llama: Path, tmp_path: Path) -> None:
    endpoint.health = 401
    with pytest.raises(ServingError, match="answers /health with 401"):
        take(endpoint, plan_for(tiny_llama), tmp_path)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://gpu7:8000", "http://gpu7:8000"),
        ("https://gpu7/v1/", "https://gpu7"),
        ("https://gate.example/llama/v1", "https://gate.example/llama"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_without_the_path_of_the_api(text: str, url: str) -> None:
    assert endpoint_url(text) == url


@pytest.mark.parametrize(
    "text",
    ["gpu7:8000", "ftp://gpu7", "http://", "http://gpu7:99999", "http://me:secret@gpu7", "http://gpu7/?key=secret"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError) as caught:
        endpoint_url(text)
    assert "\n" not in caught.value.message
    assert "me:secret" not in str(caught.value)
