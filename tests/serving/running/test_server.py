"""The launcher against a stand-in server: it starts, explains, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.launchers import LocalLauncher

ROOT = Path(__file__).resolve().parents[3]

OWNER = """
import signal, sys, time
from pathlib import Path
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.plan import LaunchPlan
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it ignored
command, model, log = sys.argv[1:]
plan = LaunchPlan({}, ("vllm", "serve", model, "--served-model-name", "m"), "m", 1, ())
try:
    with LocalLauncher(command, stop_grace=0.5).launch(plan, Path(log), startup_timeout=30):
        print("ready", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def plan_for(model: Path, **env: str) -> LaunchPlan:
    return LaunchPlan(env, ("vllm", "serve", str(model), "--served-model-name", "m"), "m", 1, ())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended, before or while it was read
        return False
    return state not in {"Z", "X"}


def survivors(model: Path, *, within: float = 10.0) -> list[int]:
    pids = json.loads((model / "pids.json").read_text())
    assert len(pids) == 3
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_a_server_answers_then_every_process_is_gone(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path):
    model = fake_model(mode="slow", seconds=0.5)
    log = tmp_path / "logs" / "server.log"
    with LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), log, startup_timeout=30) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert server.version() == "0.32.0+fake"
        assert server.started_seconds >= 0.5
        own = json.loads((model / "pids.json").read_text())[0]
        assert alive(own)
    assert survivors(model, within=0) == []
    assert not alive(own)


def test_only_the_loopback_interface_is_asked_for(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path):
    model = fake_model()
    with LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), tmp_path / "log") as server:
        arguments = json.loads((model / "arguments.json").read_text())
        listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    port = int(server.base_url.rpartition(":")[2])
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


def test_secrets_and_settings_of_the_shell_stay_outside(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    model = fake_model()
    plan = plan_for(model, OMP_NUM_THREADS="2", MY_TOKEN="hush")
    with LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan, tmp_path / "log"):
        seen = json.loads((model / "environment.json").read_text())
    assert "hush" not in seen.values()
    assert "VLLM_ROCM_USE_AITER" not in seen
    expected = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3", "LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    assert (expected | offline).items() <= seen.items()


def test_an_early_end_is_explained_by_its_log(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path):
    complaint = (
        "(EngineCore pid=7) ERROR 11-21 00:00:00 [core.py:1] "
        "NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.\n"
    )
    model = fake_model(mode="die", code=3, log=complaint + "RuntimeError: Engine core initialization failed.\n")
    with (
        pytest.raises(ServingError, match=r"ended with code 3 .* neither AVX-512 nor AMX") as caught,
        LocalLauncher(fake_vllm).launch(plan_for(model), tmp_path / "log"),
    ):
        pass
    assert str(tmp_path / "log") in (caught.value.hint or "")
    assert "\n" not in caught.value.message


def test_silence_ends_with_the_timeout(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path):
    model = fake_model(mode="hang", log="loading shard 3 of 7\n")
    began = time.monotonic()
    with (
        pytest.raises(ServingError, match=r"did not answer within 1\.5 s; its last words: loading shard 3 of 7"),
        LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), tmp_path / "log", startup_timeout=1.5),
    ):
        pass
    assert time.monotonic() - began < 15
    assert survivors(model) == []


def test_a_server_of_another_model_is_not_taken_for_ours(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
):
    model = fake_model(root="/somebody/elses")
    with (
        pytest.raises(UserError, match="is in use"),
        LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), tmp_path / "log"),
    ):
        pass
    assert survivors(model) == []


def test_an_exception_in_the_block_ends_a_server_that_ignores_sigterm(
    fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
):
    model = fake_model(mode="stubborn")
    with (
        pytest.raises(ZeroDivisionError),
        LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), tmp_path / "log"),
    ):
        raise ZeroDivisionError
    assert survivors(model, within=0) == []


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGINT, "serve"), (signal.SIGTERM, "serve"), (signal.SIGKILL, "serve"), (signal.SIGKILL, "hang")],
)
def test_no_process_outlives_its_owner(
    number: signal.Signals, mode: str, fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path
):
    model = fake_model(mode=mode)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(fake_vllm), str(model), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert owner.stdout is not None
    if mode == "serve":
        assert owner.stdout.readline() == "ready\n"
    else:
        while not (model / "pids.json").exists():
            assert owner.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
    owner.send_signal(number)
    said = owner.stdout.read()
    owner.wait(timeout=20)
    assert survivors(model) == []
    assert said == ("interrupted\n" if number is signal.SIGINT else "")


def test_a_killed_supervisor_takes_the_server_with_it(fake_vllm: Path, fake_model: Callable[..., Path], tmp_path: Path):
    model = fake_model()
    with LocalLauncher(fake_vllm, stop_grace=0.3).launch(plan_for(model), tmp_path / "log"):
        own, *others = json.loads((model / "pids.json").read_text())
        supervisor = int(Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while alive(own) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(own)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
