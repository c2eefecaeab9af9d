"""The embedded recipe through every stage with a real vLLM, once for all tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.serving.environment import VllmEnvironment, find_vllm
from pipeline.serving.hardware import local_cpu_flags, refusal
from tests.e2e.project import RECIPE, Finished, Project
from tests.processes import processes_naming
from tests.warm import executable


@pytest.fixture(scope="session")
def vllm() -> Path:
    try:
        found = find_vllm().executable
    except UserError as error:
        pytest.skip(f"no vLLM to serve with: {error.message}")
    reason = refusal("cpu", "ptpc_fp8", "fp8", "compressed-tensors", cpu_flags=local_cpu_flags())
    if reason is not None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def warm_vllm(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEnvironment]:
    """The same vLLM, imported once for all starts of a file; `test_serve` and others start it as users do."""
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch, executable.warm_vllm(folder, find_vllm(vllm)) as found:
        # PyTorch sets it where a model was quantized in the process that then serves: all shall start with the same.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield found


@pytest.fixture(scope="module")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python whose programs, lm-eval's and the reference runtime's among them, are forks with one thread each."""
    folder = tmp_path_factory.mktemp("python")
    with executable.warm_python(folder, {**os.environ, "OMP_NUM_THREADS": "1"}) as found:
        yield found


@pytest.fixture(scope="session")
def project(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"), vllm)


@pytest.fixture(scope="module")
def finished(project: Project, warm_vllm: VllmEnvironment, warm_python: Path) -> Finished:
    """The run that is killed, and all that it starts, is as users have it; the same command that completes it is warm.

    What the kill left is looked at before the warm processes have started anything.
    """
    log = project.home / "first.log"
    process = project.start("run", RECIPE, log=log)
    try:
        _wait_for(process, log, lambda: any(project.store.glob("evaluate/*.work/samples/*.json")))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    survivors = _gone_within(project, seconds=60)
    before = {str(path.parent.relative_to(project.store)): path.stat().st_mtime_ns for path in _records(project)}
    project = replace(project, vllm=warm_vllm.executable, python=warm_python)
    done = project.run("run", RECIPE, "--json")
    assert done.stdout, done.stderr
    return Finished(project, log.read_text(), before, survivors, json.loads(done.stdout), done.returncode, done.stderr)


def _records(project: Project) -> list[Path]:
    return sorted(project.store.glob("*/*/record.json"))


def _wait_for(process: subprocess.Popen[bytes], log: Path, reached: Any, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if process.poll() is not None:
            pytest.fail(f"the run ended with {process.returncode} before it could be killed:\n{log.read_text()}")
        if time.monotonic() > end:
            pytest.fail(f"the run did not get there in {seconds:g} s:\n{log.read_text()}")
        time.sleep(0.05)


def _gone_within(project: Project, *, seconds: float) -> tuple[str, ...]:
    """Command lines that still name the project's store after a grace period: none may be left."""
    end = time.monotonic() + seconds
    while (left := processes_naming(str(project.store))) and time.monotonic() < end:
        time.sleep(0.2)
    return left
