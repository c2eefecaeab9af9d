"""The embedded recipe through every stage with a real vLLM, once for all tests of this folder."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from tests.e2e.project import RECIPE, Finished, Project
from tests.processes import processes_naming


@pytest.fixture(scope="session")
def vllm() -> Path:
    try:
        return find_vllm().executable
    except UserError as error:
        pytest.skip(f"no vLLM to serve with: {error.message}")


@pytest.fixture(scope="session")
def project(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"), vllm)


@pytest.fixture(scope="module")
def finished(project: Project, warm_vllm: VllmEnvironment, warm_python: Path) -> Finished:
    """Killed when both canaries are done, then while questions are asked, then completed, by the same command.

    The second, and all that it starts, is as users have it; of the others the servers are warm.
    """
    log, canary = project.home / "first.log", "canary-candidate: done"
    _killed(replace(project, vllm=warm_vllm.executable), log, lambda: canary in log.read_text())
    before = {str(path.parent.relative_to(project.store)): path.stat().st_mtime_ns for path in _records(project)}
    log = project.home / "second.log"
    _killed(project, log, lambda: any(project.store.glob("evaluate/*.work/samples/*.json")))
    survivors = _gone_within(project, seconds=60)
    project = replace(project, vllm=warm_vllm.executable, python=warm_python)
    done = project.run("run", RECIPE, "--json")
    assert done.stdout, done.stderr
    return Finished(project, log.read_text(), before, survivors, json.loads(done.stdout), done.returncode, done.stderr)


def _killed(project: Project, log: Path, reached: Callable[[], bool]) -> None:
    process = project.start("run", RECIPE, log=log)
    try:
        _wait_for(process, log, reached)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _records(project: Project) -> list[Path]:
    return sorted(project.store.glob("*/*/record.json"))


def _wait_for(process: subprocess.Popen[bytes], log: Path, reached: Callable[[], bool], seconds: float = 600) -> None:
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
