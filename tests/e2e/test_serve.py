"""`quantmint serve` with a real vLLM: an OpenAI client is answered, and nothing is left however it is stopped."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.project import Project
from tests.processes import processes_naming

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
#: Asked with the client that vLLM brings along.
CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
assert [model.id for model in client.models.list()] == ["model"]
greedy = {"model": "model", "max_tokens": 4, "temperature": 0}
print(client.completions.create(prompt=sys.argv[2], **greedy).choices[0].text)
messages = [{"role": "user", "content": sys.argv[2]}]
print(client.chat.completions.create(messages=messages, **greedy).choices[0].message.content)
"""
PROMPT = "Rasen lives in"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps({"model": "model", **body}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 300
    while "\nstop " not in (text := log.read_text()):
        assert process.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.1)
    return text


def answers(project: Project, port: int) -> list[str]:
    """What OpenAI's client prints: a completion, and an answer of a chat."""
    command = [project.vllm.parent / "python", "-c", CLIENT, f"http://127.0.0.1:{port}/v1", PROMPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture
def chatting(tmp_path: Path) -> Path:
    """The embedded model is no chat model: with a template that says just what was said it answers all the same."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_answers_and_leaves_nothing(
    project: Project, tmp_path: Path, chatting: Path, number: signal.Signals
) -> None:
    """To our process SIGTERM is SIGINT: `test_foreground`."""
    port, log = free_port(), tmp_path / "serve.log"
    model = chatting if number == signal.SIGINT else MODEL
    process = project.start("serve", str(model), "--target", "cpu", "--port", str(port), log=log)
    try:
        told = wait_until_ready(process, log)
        assert f"at http://127.0.0.1:{port}" in told
        assert "KV cache" in told
        status, completion = post(port, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
        assert status == 200, completion
        text = completion["choices"][0]["text"]
        assert text.strip()
        if model is chatting:
            assert answers(project, port) == [text, text], "the greedy continuation, whoever asks"
    finally:
        process.send_signal(number)
        code = process.wait(timeout=120)
    assert code == (-number if number == signal.SIGKILL else 0)
    end = time.monotonic() + 60
    while (left := processes_naming(f"--port {port}")) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_busy_port_is_one_line(project: Project) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ended = project.run("serve", str(MODEL), "--target", "cpu", "--port", str(other.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line for line in ended.stderr.splitlines() if "is in use" in line]
    assert "Traceback" not in ended.stderr


def test_a_wrong_path_is_one_line(project: Project) -> None:
    ended = project.run("serve", "recipes/tiny/modle", "--target", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
