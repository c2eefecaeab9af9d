"""Starts vLLM from a plan on this machine, and leaves no process behind.

::

    with LocalLauncher(find_vllm().executable).launch(plan, log_path, startup_timeout=600) as server:
        print(server.base_url, server.scan_log().kv_tokens)

The server listens on 127.0.0.1 only. It is the child of a supervisor (`supervisor.py`) that ends the whole process
group when this process lets go of a pipe, which the kernel does for it even after SIGKILL.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import ServingError, UserError
from pipeline.serving.child_environment import child_environment
from pipeline.serving.diagnosis import diagnose
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.server import HOST, Server, fetch, served_models

SUPERVISOR = Path(__file__).with_name("supervisor.py")
"""The script that ends a child with its owner; its docstring says how it is called."""
_PORT_ATTEMPTS = 3
_POLL_S = 0.1
_LOG_TAIL = 4 << 20


class LocalLauncher:
    """Launches ``vllm serve`` with one executable on this machine.

    ``stop_grace`` is how many seconds a server gets between SIGTERM and SIGKILL.
    """

    def __init__(self, vllm_executable: Path | str, *, stop_grace: float = 15.0) -> None:
        self.executable = Path(vllm_executable)
        self.stop_grace = stop_grace

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0) -> Iterator[Server]:
        """Serve while the block runs; the log goes to ``log_path``.

        Raises ServingError, with the cause that the log names, when the server ends or does not answer within
        ``startup_timeout`` seconds; UserError when the model's folder is not there.
        """
        if not Path(plan.model).is_dir():
            raise UserError(f"{plan.model} is not a folder with a model")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            with _reserved_port() as port:
                running = _Running(self, plan, port, log_path)
                try:
                    server = running.wait_until_ready(startup_timeout)
                except _PortTakenError as error:
                    running.stop()
                    if attempt == _PORT_ATTEMPTS:
                        raise ServingError(
                            f"{_PORT_ATTEMPTS} ports in a row were taken", hint=f"log: {log_path}"
                        ) from error
                    continue
                except BaseException:
                    running.stop()
                    raise
            try:
                yield server
            finally:
                running.stop()
            return


class _PortTakenError(Exception):
    """Another process listens where the server wanted to."""


class _Running:
    """A supervisor and the server below it."""

    def __init__(self, launcher: LocalLauncher, plan: LaunchPlan, port: int, log_path: Path) -> None:
        self.plan, self.port, self.log_path = plan, port, log_path
        self._grace = launcher.stop_grace
        self._began = time.monotonic()
        command = [str(launcher.executable), *plan.argv[1:], "--host", HOST, "--port", str(port)]
        with log_path.open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(self._grace), *command],
                stdin=subprocess.PIPE,  # held open by us alone: its end is the order to stop
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(os.environ, plan.env),
                start_new_session=True,
            )

    def wait_until_ready(self, timeout: float) -> Server:
        pid = self._read_pid()
        while not self._healthy():
            if self._supervisor.poll() is not None:
                raise self._early_end(self._supervisor.returncode)
            if time.monotonic() - self._began > timeout:
                raise ServingError(
                    f"vLLM did not answer within {timeout:g} s; its last words: {diagnose(self._log()).message}",
                    hint=f"its log: {self.log_path}",
                )
            time.sleep(_POLL_S)
        return Server(self.plan.served_model_name, self.port, pid, self.log_path, time.monotonic() - self._began)

    def stop(self) -> None:
        """Let go of the pipe, then wait until every process has ended; an interrupt stops only the wait."""
        pipes = self._supervisor
        if pipes.stdin is not None:
            pipes.stdin.close()
        if pipes.stdout is not None:
            pipes.stdout.close()
        self._supervisor.wait()

    def _read_pid(self) -> int:
        line = self._supervisor.stdout.readline() if self._supervisor.stdout is not None else b""
        if not line:
            self._supervisor.wait()
            raise self._early_end(self._supervisor.returncode)
        return int(line)

    def _healthy(self) -> bool:
        """Whether *our* server answers: one that took the port first would serve other models."""
        try:
            status, _ = fetch(self.port, "/health", timeout=5)
            if status != 200:
                return False
            status, body = fetch(self.port, "/v1/models", timeout=5)
            models = served_models(body)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return False
        name, model = self.plan.served_model_name, self.plan.model
        if status != 200 or name not in models or models[name] not in {None, model}:
            raise _PortTakenError
        return True

    def _early_end(self, code: int) -> Exception:
        found = diagnose(self._log())
        if found.name == "port":
            return _PortTakenError()
        hint = f"its log: {self.log_path}"
        return ServingError(
            f"vLLM ended with code {code} before it answered: {found.message}",
            hint=hint if found.fix is None else f"{found.fix}; {hint}",
        )

    def _log(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL))
            return log.read().decode("utf-8", errors="replace")


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port of the loopback interface that the kernel gives to nobody else during the block.

    Bound but not listening, with SO_REUSEADDR: that keeps it from being handed out, and lets a server that sets the
    same option, as vLLM does, listen on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]
