"""The program: started as a run starts it, asked over HTTP, gone with its owner."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ServingError
from pipeline.reference.__main__ import main
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.running.local import ReferenceLauncher, reference_plan
from pipeline.serving.running.server import HOST, Server
from tests.processes import processes_naming

pytestmark = pytest.mark.slow

OWNER = """
import sys
from pathlib import Path
from pipeline.serving.running.local import ReferenceLauncher, reference_plan
plan = reference_plan(Path(sys.argv[1]), served_model_name="m", max_model_len=64, kv_cache_dtype="auto")
with ReferenceLauncher("cpu").launch(plan, Path(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def plan_of(folder: Path, kv_cache_dtype: str = "fp8") -> LaunchPlan:
    return reference_plan(folder, served_model_name="m", max_model_len=64, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture(scope="module")
def warm(warm_python: Path) -> Iterator[None]:
    """What it imports has been imported; the last test starts it as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python))
        yield


@pytest.fixture(scope="module")
def server(quantize: Any, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = quantize("llama", "compressed-tensors").folder
    with ReferenceLauncher("cpu").launch(plan_of(folder), tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def post(server: Server, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_it_says_what_it_is(server: Server) -> None:
    facts = json.loads(server.get("/version"))
    assert facts["version"].startswith("transformers ")
    assert facts["runtime"] == (
        f"{facts['version']} in float32, dequantized weights, simulated FP8 activations, FP8 KV cache"
    )
    assert facts["kv_cache_dtype"] == "fp8"
    assert facts["device"]["hardware"] == "cpu"
    assert facts["device"]["name"]
    (model,) = json.loads(server.get("/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("m", 64)
    assert server.log_path is not None
    assert facts["runtime"] in server.log_path.read_text()


def test_many_connections_are_answered_as_one(server: Server) -> None:
    def ask(number: int) -> Any:
        body = {"prompt": [5 + number, 6, 7], "max_tokens": 3, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        return json.loads(server.post("/v1/completions", body))["choices"][0]

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(16) as callers:
        together = list(callers.map(ask, range(16)))
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in alone}) > 1


def test_what_it_does_not_answer_it_refuses_and_goes_on(server: Server) -> None:
    assert post(server, b"{")[0] == 400
    assert post(server, b"[]")[1]["error"]["message"] == "expected a JSON object"
    assert post(server, b'{"prompt": "w5", "temperature": 0}', "/v1/chat/completions")[0] == 404
    status, answer = post(server, b'{"prompt": "w5", "temperature": 1}')
    assert (status, answer["error"]["param"]) == (400, "temperature")
    assert post(server, b"", **{"Content-Length": "-1"})[0] == 400
    with pytest.raises(ServingError, match="404"):
        server.get("/metrics")
    assert server.get("/health") == "{}"


def test_one_that_cannot_load_says_why(models: Any, warm: None, tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match=r"the reference runtime ended with code 2 .*no scales for its cache"),
        ReferenceLauncher("cpu").launch(plan_of(models("llama")), tmp_path / "log"),
    ):
        pass


def test_it_listens_to_this_machine_alone(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(models("llama")), "--host", "0.0.0.0"]) == 2  # noqa: S104 - it is refused
    assert "expected an address of the loopback interface" in capsys.readouterr().err


def test_it_ends_with_its_owner_however_that_ends(models: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-of-its-own"
    folder.symlink_to(models("llama"))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    assert any("pipeline.reference" in line for line in processes_naming(str(folder)))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end = time.monotonic() + 30
    while (left := processes_naming(str(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == ()
