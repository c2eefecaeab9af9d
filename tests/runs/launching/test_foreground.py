"""`quantmint serve` as a process of its own, with a stand-in for vLLM: started, asked, stopped in every way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
case "$2" in *distributions*) echo '{{"vllm": "0.32.0"}}';; *metadata*) echo 0.32.0;; *) exec {python} "$@";; esac
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """An environment with a command and an interpreter that knows its version."""
    source = (ROOT / "tests" / "serving" / "fake_vllm.py").read_text()
    for name, text in (("vllm", f"#!{sys.executable}\n{source}"), ("python", PYTHON.format(python=sys.executable))):
        path = tmp_path / "environment" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path / "environment"


@pytest.fixture
def model(write_model: Callable[..., Path]) -> Callable[..., Path]:
    def make(**settings: object) -> Path:
        folder = write_model(Path.cwd() / "model")
        (folder / "fake.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.fixture
def start(vllm: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "quantmint", "serve", "--vllm", vllm, "--target", "cpu", *arguments]
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def ready(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it can be asked."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("stop "):
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait()}: {lines} {process.communicate()[1]}"
        lines.append(line.rstrip())
    return lines


def gone(folder: Path, port: int) -> bool:
    """Whether none of the server's processes is left, and its port is free."""
    end = time.monotonic() + 30
    pids = json.loads((folder / "pids.json").read_text())
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    "number",
    # Killed, it leaves everything to the supervisor; children that ignore SIGTERM take their time to be ended.
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_it_serves_until_it_is_told_to_stop(start: Start, model: Callable[..., Path], number: signal.Signals) -> None:
    log = "INFO Using TORCH_SDPA backend\nINFO CPU KV cache size: 4,096 tokens\n"
    log += (
        "INFO Maximum concurrency for 512 tokens per request: 8.00x\nUsing KV cache scaling factor 1.0 for fp8_e4m3\n"
    )
    children = {} if number == signal.SIGKILL else {"children": []}
    folder, port = model(log=log, **children), free_port()
    process = start(folder, "--port", port)
    told = ready(process)
    assert told[0].startswith(f"serving     model at http://127.0.0.1:{port}, ready after")
    assert "KV cache    4,096 tokens, 8.0 requests of full length at a time" in told
    assert any(line.startswith("fault       the checkpoint's KV scales were missing") for line in told)
    assert any("the size of the KV cache differs from the plan" in line for line in told)
    asked = shlex.split(next(line for line in told if line.startswith("try ")).removeprefix("try"))
    assert asked[2] == f"http://127.0.0.1:{port}/v1/completions"
    assert json.loads(asked[-1])["model"] == "model"
    given = json.loads((folder / "arguments.json").read_text())
    assert given[given.index("--host") + 1] == "127.0.0.1"
    assert given[given.index("--port") + 1] == str(port)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert (process.returncode, out, err.strip().splitlines()[-1:]) == (
            0,
            "stopped\n",
            err.strip().splitlines()[-1:],
        )
        assert "Traceback" not in err
    assert gone(folder, port)


def test_a_stop_before_it_answers(start: Start, model: Callable[..., Path]) -> None:
    folder, port = model(mode="hang", children=[]), free_port()
    process = start(folder, "--port", port)
    end = time.monotonic() + 60
    while not (folder / "pids.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "stopped before it answered" in err
    assert gone(folder, port)


def test_a_server_that_cannot_start(start: Start, model: Callable[..., Path]) -> None:
    log = "ValueError: No available memory for the cache blocks.\n"
    process = start(model(mode="die", log=log), "--port", free_port(), "--kv-cache-dtype", "fp8")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "the checkpoint has no scales for an FP8 KV cache" in err, "what the plan warns of"
    assert "vLLM ended with code 1 before it answered" in err
    assert "Traceback" not in err


def test_a_server_that_dies(start: Start, model: Callable[..., Path]) -> None:
    folder, port = model(children=[]), free_port()
    process = start(folder, "--port", port)
    ready(process)
    os.kill(json.loads((folder / "pids.json").read_text())[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "vLLM ended with code 137 while it was in use" in err
    assert gone(folder, port)


def test_a_folder_without_weights(start: Start, model: Callable[..., Path]) -> None:
    folder = model()
    (folder / "model.safetensors").unlink()
    _, err = (process := start(folder)).communicate(timeout=60)
    assert process.returncode == 2
    assert "has no *.safetensors" in err
    assert not (folder / "starts").exists()


def test_a_server_that_runs_already_is_left_alone(start: Start, model: Callable[..., Path]) -> None:
    folder, port = model(children=[]), free_port()
    first = start(folder, "--port", port)
    ready(first)
    second = start(folder, "--launcher", "endpoint", "--endpoint", f"http://127.0.0.1:{port}/v1")
    told = ready(second)
    assert told[0].startswith(f"serving     model at http://127.0.0.1:{port}")
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, "stopped\n"), err
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_server_has_the_gpus_that_its_caller_has(start: Start, model: Callable[..., Path], name: str) -> None:
    folder = model(children=[])
    target = "h100:1" if name.startswith("CUDA") else "mi300x:1"
    process = start(folder, "--port", free_port(), "--target", target, **{name: "5,6"})
    ready(process)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert "HIP_VISIBLE_DEVICES" not in environment, "vLLM on ROCm stops where the two differ"
    process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "variables", "message"),
    [
        ("h100:2", {"CUDA_VISIBLE_DEVICES": "4"}, "CUDA_VISIBLE_DEVICES=4 leaves 1 GPUs, expected 2 for this launch"),
        ("h100:1", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= leaves 0 GPUs, expected 1 for this launch"),
        ("mi300x:1", {"HIP_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "5"}, "name different GPUs"),
    ],
)
def test_a_launch_takes_no_gpu_that_its_caller_has_not(
    start: Start, model: Callable[..., Path], target: str, variables: dict[str, str], message: str
) -> None:
    folder = model()
    layout = ("--set", f"tensor-parallel-size={target[-1]}")
    process = start(folder, "--port", free_port(), "--target", target, *layout, **variables)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, message in said) == (2, True), said
    assert not (folder / "starts").exists()
