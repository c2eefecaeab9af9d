"""The docker launcher with a stand-in for docker that really runs what it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.running.launchers import DockerLauncher

ROOT = Path(__file__).resolve().parents[3]
SERVING = Path(__file__).resolve().parents[1]

OWNER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from quantmint.pipeline.serving.running.launchers import DockerLauncher
from test_docker import launch
plan, processes = launch(Path(sys.argv[1]))
with DockerLauncher("mine:1", stop_grace=1).deploy(plan, processes, Path(sys.argv[2]), notify=lambda line: None):
    print("ready", os.getpid(), flush=True)
    time.sleep(600)
"""


def launch(model: Path, *, port: int | None = None, replicas: int = 1) -> tuple[LaunchPlan, tuple[Process, ...]]:
    plan = LaunchPlan(
        env={"VLLM_ROCM_USE_AITER": "1"},
        argv=("vllm", "serve", str(model), "--served-model-name", "m"),
        served_model_name="m",
        tensor_parallel_size=1,
        reasons=(),
        target="mi300x:1",
        vllm_version="0.33.0",
        docker=("--ipc=host", "--group-add=video", "--device=/dev/kfd", "--device=/dev/dri"),
    )
    return plan, tuple(
        Process(0, "server", rank, (rank,), port, {"CUDA_VISIBLE_DEVICES": str(rank)}, plan.argv)
        for rank in range(replicas)
    )


@pytest.fixture
def docker(tmp_path: Path, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The engine's folder; `docker` and the containers' `vllm` are on PATH."""
    client = fake_vllm.with_name("docker")
    client.write_text(f"#!{sys.executable}\n{(SERVING / 'fake_docker.py').read_text()}")
    client.chmod(0o755)
    folder = tmp_path / "engine"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}")
    engine = subprocess.Popen([client, "engine", folder])
    while not (folder / "engine.pid").exists():
        time.sleep(0.02)
    yield folder
    engine.terminate()
    engine.wait()
    # A real container takes with it what left its group.
    for noted in tmp_path.rglob("pids-*.json"):
        for pid in json.loads(noted.read_text()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def calls(docker: Path) -> list[list[str]]:
    return [json.loads(line) for line in (docker / "calls").read_text().splitlines()]


def left(docker: Path, model: Path, *, within: float = 20.0) -> list[int]:
    """Processes of containers that still run."""
    pids = json.loads((model / "pids.json").read_text())
    deadline = time.monotonic() + within
    while True:
        alive = []
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # it ended, before or while it was read
                continue
            alive += [pid] if state not in "ZX" else []
        containers = list(docker.glob("*.pid"))
        if (not alive and len(containers) == 1) or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def test_the_exact_command(docker: Path, fake_model: Callable[..., Path], tmp_path: Path) -> None:
    model = fake_model()
    said: list[str] = []
    plan, processes = launch(model)
    with DockerLauncher("mine:1", stop_grace=2).deploy(
        plan, processes, tmp_path / "logs", notify=said.append
    ) as running:
        (server,) = running.servers
        assert server.version() == "0.32.0+fake"
        assert server.log_path == tmp_path / "logs" / "server-0.log"
        running.check()
        seen = json.loads((model / "environment.json").read_text())
    name = f"quantmint-{os.getpid()}-0"
    assert said == [f"running mine:1 as {name}"]
    assert calls(docker) == [
        [
            "run",
            "--rm",
            f"--name={name}",
            "--network=host",
            "--ipc=host",
            "--group-add=video",
            "--device=/dev/kfd",
            "--device=/dev/dri",
            f"--volume={model}:{model}:ro",
            "--env=VLLM_ROCM_USE_AITER=1",
            "--env=CUDA_VISIBLE_DEVICES=0",
            "--env=DO_NOT_TRACK=1",
            "--env=HF_HUB_OFFLINE=1",
            "--env=TRANSFORMERS_OFFLINE=1",
            "--env=VLLM_NO_USAGE_STATS=1",
            "--entrypoint=vllm",
            "mine:1",
            "serve",
            str(model),
            "--served-model-name",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            server.base_url.rpartition(":")[2],
        ],
        ["stop", "--time=2", name],
        ["rm", "--force", name],
    ]
    assert seen["VLLM_ROCM_USE_AITER"] == "1"
    assert not list(docker.glob("quantmint-*.pid"))


@pytest.mark.parametrize(("client", "number"), [("proxy", signal.SIGTERM), ("deaf", signal.SIGKILL)])
def test_no_container_outlives_its_owner(
    docker: Path,
    fake_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    client: str,
) -> None:
    monkeypatch.setenv("DOCKER_API_VERSION", client)
    model = fake_model(mode="stubborn")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, model, tmp_path / "logs", Path(__file__).parent],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith("ready")
    owner.send_signal(number)
    owner.wait(timeout=20)
    assert left(docker, model) == []
    deadline = time.monotonic() + 20
    while len(calls(docker)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [call[0] for call in calls(docker)] == ["run", "stop", "rm"]


def test_an_image_that_nobody_has(docker: Path, fake_model: Callable[..., Path], tmp_path: Path) -> None:
    plan, processes = launch(fake_model())
    with (
        pytest.raises(ServingError, match=r"there is no image no/such:1") as caught,
        DockerLauncher("no/such:1").deploy(plan, processes, tmp_path / "logs", notify=lambda _: None),
    ):
        pass
    assert "--image" in (caught.value.hint or "")
