"""A whole plan on one machine, with a stand-in for vLLM: replicas, headless engines, ports that are not free."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.base.processes import Child
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout, Process
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.server import NO_BALANCER, Notify

ROOT = Path(__file__).resolve().parents[3]

OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from test_local import launch
command, model, logs = sys.argv[1:4]
plan, processes = launch(Path(model), replicas=3)
with LocalLauncher(command, stop_grace=0.5).deploy(plan, processes, Path(logs), notify=lambda _: None):
    print("ready", flush=True)
    time.sleep(600)
"""


def launch(model: Path, *, replicas: int = 1, ports: tuple[int, ...] = ()) -> tuple[LaunchPlan, list[Process]]:
    plan = LaunchPlan({"SHARED": "yes"}, ("vllm", "serve", str(model), "--served-model-name", "m"), "m", 1, ())
    return plan, [
        Process(
            0, "server", rank, (rank,), ports[rank] if ports else None, {"CUDA_VISIBLE_DEVICES": str(rank)}, plan.argv
        )
        for rank in range(replicas)
    ]


def alive(model: Path, *, within: float = 0.0) -> list[int]:
    """Processes of all servers that still run."""
    pids = [pid for file in model.glob("pids-*.json") for pid in json.loads(file.read_text())]
    assert pids
    deadline = time.monotonic() + within
    while True:
        found = []
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # it ended, before or while it was read
                continue
            found += [pid] if state not in "ZX" else []
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def free_ports(count: int) -> tuple[int, ...]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = tuple(each.getsockname()[1] for each in held)
    for each in held:
        each.close()
    return ports


def test_replicas_answer_each_with_its_devices_and_log(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
) -> None:
    ports = free_ports(3)
    model = fake_model(log="one of three\n")
    plan, processes = launch(model, replicas=3, ports=ports)
    said: list[str] = []
    with LocalLauncher(fake_vllm, stop_grace=0.3).deploy(
        plan, processes, tmp_path / "logs", startup_timeout=30, notify=said.append
    ) as running:
        assert [server.base_url for server in running.servers] == [f"http://127.0.0.1:{port}" for port in ports]
        assert [server.version() for server in running.servers] == ["0.32.0+fake"] * 3
        running.check()
        assert len(alive(model)) == 9
        environment = json.loads((model / "environment.json").read_text())
    assert environment["SHARED"] == "yes"
    assert {file.stem for file in model.glob("pids-*.json")} == {"pids-0", "pids-1", "pids-2"}
    assert alive(model) == []
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"server-{rank}.log" for rank in range(3)]
    assert (tmp_path / "logs" / "server-2.log").read_text() == "one of three\n"
    assert sum("is ready after" in line for line in said) == 3
    assert said[-1] == NO_BALANCER


def test_servers_of_one_gpu_load_one_after_the_other(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantmint.pipeline.serving.running.server._HEARTBEAT_S", 0.0)
    model = fake_model(mode="slow", seconds=0.3)
    plan, processes = launch(model, replicas=4)
    plan = replace(plan, layout=ParallelLayout(replicas=2, packed=2))
    started: list[tuple[int, bool]] = []

    class Watched(LocalLauncher):
        def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, notify: Notify) -> Child:
            answering = any("replica 0 is ready" in line for line in said) and any("replica 2 is" in s for s in said)
            started.append((process.replica, answering))
            return super()._start(plan, process, port, log_path, notify)

    said: list[str] = []
    with Watched(fake_vllm, stop_grace=0.3).deploy(plan, processes, tmp_path / "logs", notify=said.append) as running:
        assert len(running.servers) == len({server.base_url for server in running.servers}) == 4
    assert started == [(0, False), (2, False), (1, True), (3, True)]
    assert any("replica 1 is still starting after 0 s; its last words: " in line for line in said)
    assert sum("is ready after" in line for line in said) == 4


def test_headless_engines_belong_to_the_launch(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = fake_model()
    plan, [server] = launch(model)
    headless = Process(0, "headless", 0, (1,), None, {"CUDA_VISIBLE_DEVICES": "1"}, (*plan.argv, "--headless"))
    elsewhere = Process(1, "headless", 1, (0,), None, {"CUDA_VISIBLE_DEVICES": "7"}, (*plan.argv, "--headless"))
    launcher = LocalLauncher(fake_vllm, stop_grace=0.3)
    with launcher.deploy(plan, [server, headless, elsewhere], tmp_path / "logs", notify=lambda _: None) as running:
        assert len(running.servers) == 1
        while not (model / "pids-1.json").exists():
            time.sleep(0.02)
        os.kill(json.loads((model / "pids-1.json").read_text())[0], signal.SIGKILL)
        with pytest.raises(ServingError, match="the headless engine ended with code 137"):
            running.watch()
    assert alive(model) == []
    assert not (model / "pids-7.json").exists()


def test_one_replica_that_does_not_start_ends_the_others(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
) -> None:
    sick = {"mode": "die", "code": 9, "log": "torch.OutOfMemoryError: HIP out of memory.\n"}
    model = fake_model(devices={"1": sick})
    plan, processes = launch(model, replicas=3)
    with (
        pytest.raises(
            ServingError, match="replica 1 ended with code 9 before it answered: the device ran out"
        ) as caught,
        LocalLauncher(fake_vllm, stop_grace=0.3).deploy(plan, processes, tmp_path / "logs", notify=lambda _: None),
    ):
        pass
    assert "server-1.log" in (caught.value.hint or "")
    assert alive(model) == []


def test_a_port_that_is_held_is_not_exchanged(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path) -> None:
    model = fake_model()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        plan, processes = launch(model, ports=(port,))
        with (
            pytest.raises(UserError, match=f"^port {port} is in use") as caught,
            LocalLauncher(fake_vllm).deploy(plan, processes, tmp_path / "logs"),
        ):
            pass
    assert "--port" in (caught.value.hint or "")
    assert not (model / "starts").exists()


def test_a_node_on_the_open_internet_is_refused(fake_model: Callable[..., Path], tmp_path: Path) -> None:
    plan, [server] = launch(fake_model())
    nodes = [replace(server, env={"VLLM_HOST_IP": address}) for address in ("10.0.0.1", "8.8.8.8")]
    with (
        pytest.raises(UserError, match=r"8\.8\.8\.8 is a public address"),
        LocalLauncher("vllm").deploy(plan, nodes, tmp_path / "logs"),
    ):
        pass
