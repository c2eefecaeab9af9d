"""A real MLflow server on the loopback interface, with a database and a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that is up."""
    missing = [name for name in ("mlflow", "flask", "flask_cors", "sqlalchemy", "alembic") if find_spec(name) is None]
    if missing:
        pytest.skip(f"no MLflow server: {', '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Jobs and their workers are no part of tracking, and need what the client's package does not bring.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    argv = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'runs.sqlite'}", "--artifacts-destination", str(folder / "files"),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


def _end(process: subprocess.Popen[bytes]) -> None:
    import signal

    os.killpg(process.pid, signal.SIGTERM)  # the server and its worker
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
