"""The script is run, with a vllm of ours on PATH that writes down what it was given; YAML means one thing to all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.recipe.yaml_positions import parse
from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.render.invocation import arguments, command, script
from quantmint.pipeline.serving.render.manifest import dump

Launch = tuple[LaunchPlan, tuple[Process, ...]]
Run = Callable[..., list[dict[str, Any]]]

STUB = """#!{python}
import json, os, sys, time, uuid
with open({folder!r} + "/" + uuid.uuid4().hex + ".partial", "w") as file:
    json.dump({{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "env": dict(os.environ), "pid": os.getpid(),
               "at": time.time_ns()}}, file)
os.rename(file.name, file.name.removesuffix("partial") + "json")
time.sleep(float(os.environ.get("STUB_SLEEPS", "0")))
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    stub = tmp_path / "bin" / "vllm"
    stub.parent.mkdir()
    stub.write_text(STUB.format(python=sys.executable, folder=str(tmp_path)))
    stub.chmod(0o755)

    def start(text: str, *more: str) -> list[dict[str, Any]]:
        path = tmp_path / "launch.sh"
        path.write_text(text)
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HIP_VISIBLE_DEVICES": "5"}
        ended = subprocess.run(["bash", path, *more], env=env, check=False, timeout=60, capture_output=True)
        assert ended.returncode == 0, ended.stderr
        return sorted((json.loads(p.read_text()) for p in tmp_path.glob("*.json")), key=lambda record: record["at"])

    return start


def held_against(record: dict[str, Any], plan: LaunchPlan, process: Process) -> None:
    assert tuple(record["argv"]) == arguments(process)
    wanted = {**plan.env, **process.env}
    assert {name: record["env"].get(name) for name in wanted} == wanted
    assert "HIP_VISIBLE_DEVICES" not in record["env"], "vLLM stops where it differs from CUDA_VISIBLE_DEVICES"


def test_one_server(one: Launch, run: Run) -> None:
    plan, processes = one
    text = script(plan, processes)
    (record,) = run(text)
    held_against(record, plan, processes[0])
    assert record["argv"][-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert "# note: nobody has run this yet" in text
    assert "\n  --max-num-seqs 512 \\\n" in text, "an option a line"


def test_replicas(replicas: Launch, run: Run) -> None:
    plan, processes = replicas
    # All run until the first ends; were they not started beside each other, the third would never be.
    records = run(script(plan, processes).replace("unset", "export STUB_SLEEPS=1\nunset"))
    found = {record["env"]["CUDA_VISIBLE_DEVICES"]: record for record in records}
    assert len(found) == len(records) == 3
    for process in processes:
        held_against(found[process.env["CUDA_VISIBLE_DEVICES"]], plan, process)


def test_replicas_that_ended_together_are_no_fault_of_the_script(replicas: Launch, run: Run) -> None:
    """There is nobody left to be killed at the end, and `kill` without anybody fails."""
    text = script(*replicas)
    assert text.count("\nwait -n ") == 1
    assert len(run(text.replace("\nwait -n ", "\nwait "))) == 3


LISTENING = """
import socket
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as server:
    time.sleep(float(os.environ.get("STUB_SLEEPS", "0")))
"""


def test_servers_of_one_gpu_load_one_after_the_other(packed: Launch, tmp_path: Path, run: Run) -> None:
    stub = tmp_path / "bin" / "vllm"
    body, ending = stub.read_text().rsplit("time.sleep", 1)[0], "time.sleep(0.5)\n" + LISTENING
    stub.write_text(body + ending)
    text = script(*packed).replace("sleep 2", "sleep 0.1")
    records = run(text.replace("unset", "export STUB_SLEEPS=3\nunset"))
    when = {record["argv"][-1]: record["at"] for record in records}
    assert len(when) == 4
    assert min(when["8901"], when["8903"]) - max(when["8900"], when["8902"]) > 0.5e9, "what one of them takes to listen"
    stub.write_text(body + "sys.exit(3)\n")
    ended = subprocess.run(
        ["bash", "-c", text], env={**os.environ, "PATH": f"{stub.parent}:/usr/bin:/bin"}, check=False
    )
    assert ended.returncode != 0, "nobody waits for a server that has ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_replicas(replicas: Launch, tmp_path: Path, run: Run, number: signal.Signals) -> None:
    (tmp_path / "launch.sh").write_text(script(*replicas))
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STUB_SLEEPS": "600"}
    # A shell cannot trap what was ignored when it started, and CI may run us that way.
    process = subprocess.Popen(
        ["bash", tmp_path / "launch.sh"], env=env, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
    end = time.monotonic() + 60
    while len(started := list(tmp_path.glob("*.json"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    pids = [json.loads(path.read_text())["pid"] for path in started]
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_several_nodes(headless: Launch, run: Run) -> None:
    plan, processes = headless
    text = script(plan, processes)
    assert "# ---- node 0 (10.0.0.1): server" in text
    assert "# ---- node 1 (10.0.0.2): headless" in text
    for process in processes:
        held_against(run(text, str(process.node))[-1], plan, process)


def test_a_node_must_be_named(headless: Launch) -> None:
    for more, expected in (((), "which node: 0 1 2"), (("3",), "no such node")):
        ended = subprocess.run(
            ["bash", "-s", *more], input=script(*headless), text=True, check=False, capture_output=True
        )
        assert ended.returncode != 0
        assert expected in ended.stderr


def test_a_command_to_paste(replicas: Launch) -> None:
    text = command(replicas[1][1])
    assert text.splitlines()[0] == "CUDA_VISIBLE_DEVICES=1 vllm serve '/models/it'\"'\"'s a model' \\"
    assert text.endswith("--port 8001")


@pytest.mark.parametrize("text", ["y", "N", "yes", "5e8", "1234e56", "1e-3", ".5E+3", "0o17", "017", "1:30", "~", ""])
def test_text_stays_text(text: str) -> None:
    """To YAML 1.1, to 1.2, and to Kubernetes, whose reader takes something of both and `y` besides."""
    written = dump({"value": text})
    assert yaml.safe_load(written) == parse(written, "written").data == {"value": text}
    assert written == f"value: '{text}'\n"


@pytest.mark.parametrize("value", ["you", "1e3x", "8Gi", "a@sha256:5e8", 1000.0, 1e-30, 8, True, None])
def test_nothing_else_is_quoted(value: object) -> None:
    written = dump({"value": value})
    assert "'" not in written
    assert yaml.safe_load(written) == {"value": value}
