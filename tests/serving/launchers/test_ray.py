"""The Ray launcher with a real Ray: two nodes on one machine, each with an address and eight GPUs of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.errors import ServingError, UserError
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.launchers.ray_cluster import RayLauncher
from pipeline.serving.launchers.ray_commands import ray_command, ray_environment, start_argv
from pipeline.serving.plan import LaunchPlan, Process

if find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[3]
SERVING = Path(__file__).resolve().parents[1]
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
GPUS = 8
# A command `ray` whose nodes are lean, and whose head serves no clients of other machines.
LEAN = """
from unittest import mock
from ray.scripts import scripts
from tests.cluster.lean import lean_nodes
with lean_nodes(), mock.patch.object(scripts, "get_ray_client_dependency_error", return_value=ImportError("left out")):
    scripts.main()
"""
IMPATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}  # a minute, else, until a worker believes its head is gone
PATIENT = {"RAY_raylet_start_wait_time_s": "120"}  # half a minute, else: too little for a node of a busy machine

NODE = """
import pickle, signal, sys, time
from pathlib import Path
from pipeline.errors import QuantmintError
from pipeline.serving.launchers.ray_cluster import RayLauncher
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it ignored
launch, vllm, rank, logs, seconds = sys.argv[1:]
plan, processes = pickle.loads(Path(launch).read_bytes())
launcher = RayLauncher(vllm, node_rank=int(rank), stop_grace=3)
say = lambda line: print(line, flush=True)
try:
    with launcher.deploy(plan, processes, Path(logs), startup_timeout=float(seconds), say=say) as running:
        print("running", *(server.base_url for server in running.servers), flush=True)
        running.watch()
except QuantmintError as error:
    print("error", error.message, flush=True)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def launch(model: Path, port: int) -> tuple[LaunchPlan, tuple[Process, ...]]:
    plan = LaunchPlan(
        env={"VLLM_ROCM_USE_AITER": "1"},
        argv=("vllm", "serve", str(model), "--served-model-name", "m", "--distributed-executor-backend", "ray"),
        served_model_name="m",
        tensor_parallel_size=GPUS,
        reasons=(),
    )
    gpus = tuple(range(GPUS))
    # An interpreter is started for each CPU, whether it is used or not.
    small = ("--num-cpus=1", "--object-store-memory=100000000")
    start = ("ray", "start", "--head", f"--node-ip-address={HEAD}", f"--port={port}", *small)
    join = ("ray", "start", f"--address={HEAD}:{port}", f"--node-ip-address={WORKER}", *small)
    return plan, (
        Process(0, "ray-head", 0, gpus, None, {"VLLM_HOST_IP": HEAD} | PATIENT, start),
        Process(0, "server", 0, gpus, None, {"VLLM_HOST_IP": HEAD}, plan.argv),
        Process(1, "ray-worker", 0, gpus, None, {"VLLM_HOST_IP": WORKER} | PATIENT | IMPATIENT, join),
    )


def rays(port: int) -> list[str]:
    """Processes of the cluster on this port, and all that sits in its session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and f"{HEAD}:{port}" in words:
            found.append(f"{entry.name}: {words[:200]}")
    return found


class Node:
    """One machine of the launch: a process of its own that runs the launcher."""

    def __init__(self, folder: Path, vllm: Path, rank: int, seconds: float) -> None:
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                NODE,
                folder / "launch.pickle",
                vllm,
                str(rank),
                folder / f"logs-{rank}",
                str(seconds),
            ],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def until(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if word in line:
                return line.strip()
        raise AssertionError(f"no {word!r} in {self.said}")


@pytest.fixture
def port() -> int:
    import socket

    with socket.socket() as free:
        free.bind((HEAD, 0))
        return int(free.getsockname()[1])


@pytest.fixture
def lean() -> bool:
    """Whether Ray does without what takes most of its start."""
    return True


@pytest.fixture
def cluster(
    tmp_path: Path, port: int, lean: bool, fake_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Node]]:
    """Starts the machines of a launch; none is left when the test ends.

    A lean Ray is a command beside `vllm`; another is as it is installed, and found as a module of vLLM's interpreter.
    """
    import pickle

    commands = tmp_path / "bin"
    commands.mkdir()
    vllm = commands / "vllm"
    vllm.write_text(f"#!{sys.executable}\n{(SERVING / 'ray_vllm.py').read_text()}")
    vllm.chmod(0o755)
    if lean:
        (commands / "ray").write_text(f"#!{sys.executable}\n{LEAN}")
        (commands / "ray").chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (commands / "fake_vllm.py").write_text((SERVING / "fake_vllm.py").read_text())
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    model = fake_model(nodes=2, gpus=GPUS)
    (tmp_path / "launch.pickle").write_bytes(pickle.dumps(launch(model, port)))
    nodes: list[Node] = []

    def start(rank: int, seconds: float = 90) -> Node:
        nodes.append(Node(tmp_path, vllm, rank, seconds))
        return nodes[-1]

    yield start
    for node in nodes:
        node.process.kill()
        node.process.wait()


def gone(port: int, *, within: float = 20.0) -> list[str]:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and rays(port):
        time.sleep(0.1)
    return rays(port)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "lean"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_two_machines_serve_and_leave_nothing(
    cluster: Callable[..., Node], port: int, tmp_path: Path, number: signal.Signals
) -> None:
    worker, head = cluster(1), cluster(0)
    assert worker.until("waiting for the head")
    address = head.until("running").split()[1]
    assert address.startswith("http://127.0.0.1:")
    assert any(f"Ray has 2 of 2 machines, {2 * GPUS} GPUs" in line for line in head.said)
    assert any(f"on {WORKER}: " in line and f"--address={HEAD}:{port}" in line for line in head.said)
    assert any("RAY_AUTH_MODE" in line for line in head.said)
    seen = json.loads((tmp_path / "model" / "ray.json").read_text())
    assert seen == {"address": f"{HEAD}:{port}", "tasks": [[HEAD, HEAD, "1"], [WORKER, WORKER, "1"]]}
    assert len(rays(port)) >= 4
    sessions = set(Path("/tmp").glob("qm-ray-*"))
    mine = {folder for folder in sessions if any(str(folder) in line for line in rays(port))}
    head.process.send_signal(number)
    head.process.wait(timeout=60)
    worker.until("error")
    assert worker.process.wait(timeout=60) == 5
    assert gone(port) == []
    assert mine
    assert not any(folder.exists() for folder in mine)


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named(cluster: Callable[..., Node], port: int) -> None:
    head = cluster(0, seconds=5)
    said = head.until("error")
    assert said == f"error after 5 s 1 of 2 machines, waiting for {WORKER} ({GPUS} GPUs)"
    assert head.process.wait(timeout=60) == 5
    assert gone(port) == []


@pytest.mark.slow
def test_a_server_that_dies_ends_ray(cluster: Callable[..., Node], port: int, tmp_path: Path) -> None:
    worker, head = cluster(1), cluster(0)
    head.until("running")
    os.kill(json.loads((tmp_path / "model" / "pids.json").read_text())[0], signal.SIGKILL)
    assert "vLLM ended with code 137 while it was in use" in head.until("error")
    assert head.process.wait(timeout=60) == 5
    worker.until("error")
    assert gone(port) == []


def test_ray_runs_in_the_foreground_without_its_dashboard() -> None:
    _, (head, _, worker) = launch(Path("/models/m"), 6379)
    assert start_argv(head, ["/env/bin/ray"])[:2] == ["/env/bin/ray", "start"]
    added = {"--block", "--disable-usage-stats", f"--num-gpus={GPUS}"}
    assert added | {"--include-dashboard=false"} <= set(start_argv(head, ["ray"]))
    assert added <= set(start_argv(worker, ["ray"]))
    assert "--include-dashboard=false" not in start_argv(worker, ["ray"])
    assert (
        start_argv(Process(**{**_fields(head), "argv": (*head.argv, "--num-gpus", "4")}), ["ray"]).count(
            f"--num-gpus={GPUS}"
        )
        == 0
    )


def _fields(process: Process) -> dict[str, object]:
    return {name: getattr(process, name) for name in Process.__slots__}


def test_on_rocm_the_devices_go_by_rays_name() -> None:
    plan, _ = launch(Path("/models/m"), 6379)
    given = {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "0,1", "VLLM_HOST_IP": HEAD}
    on_rocm = ray_environment(replace(plan, target="mi300x:8x2"), given)
    assert on_rocm == {"HIP_VISIBLE_DEVICES": "0,1", "VLLM_HOST_IP": HEAD}
    assert ray_environment(replace(plan, target="cuda:8x2"), given) == given


def test_an_environment_without_ray_says_where_it_comes_from(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "vllm").write_text("")
    with pytest.raises(UserError, match="has no Ray") as caught:
        ray_command(VllmEnvironment(tmp_path / "vllm", "the test"))
    assert "pip install ray" in (caught.value.hint or "")


def test_an_address_of_the_open_internet_is_refused(tmp_path: Path, fake_model: Callable[..., Path]) -> None:
    plan, (head, *_) = launch(fake_model(), 6379)
    argv = tuple(word.replace(HEAD, "8.8.8.8") for word in head.argv)
    exposed = Process(0, "ray-head", 0, head.gpus, None, {"VLLM_HOST_IP": "8.8.8.8"}, argv)
    (tmp_path / "ray").write_text("")
    (tmp_path / "ray").chmod(0o755)
    with (
        pytest.raises(UserError, match=r"8\.8\.8\.8 is an address of the open internet"),
        RayLauncher(tmp_path / "vllm").deploy(plan, [exposed], tmp_path / "logs", say=lambda _: None),
    ):
        pass
    assert not (tmp_path / "logs").exists()


def test_a_node_that_the_launch_does_not_have(tmp_path: Path, fake_model: Callable[..., Path]) -> None:
    plan, processes = launch(fake_model(), 6379)
    (tmp_path / "ray").write_text("")
    (tmp_path / "ray").chmod(0o755)
    with (
        pytest.raises(UserError, match="no Ray on node 2"),
        RayLauncher(tmp_path / "vllm", node_rank=2).deploy(plan, processes, tmp_path / "logs"),
    ):
        pass


def test_nobody_at_the_heads_address(tmp_path: Path, port: int, fake_model: Callable[..., Path]) -> None:
    plan, processes = launch(fake_model(), port)
    (tmp_path / "ray").write_text("")
    (tmp_path / "ray").chmod(0o755)
    with (
        pytest.raises(ServingError, match=rf"after 0\.5 s no Ray answers at {HEAD}:{port}"),
        RayLauncher(tmp_path / "vllm", node_rank=1).deploy(
            plan, processes, tmp_path / "logs", startup_timeout=0.5, say=lambda _: None
        ),
    ):
        pass
