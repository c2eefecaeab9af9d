"""Run child processes that end when this process does, with their output in a log file.

`supervisor.py` runs each of them: it ends the child's whole process group when this process closes a pipe, which the
kernel does even after SIGKILL. A child's environment holds no secret that it was not given.

A `conversation` sends questions to a running program: JSON lines over a Unix socket whose name is the program's last
argument. The socket has an abstract name, so that a killed process leaves no file. Every user of the machine could
connect to it, so connections of other users are closed.
"""

from __future__ import annotations

import json
import os
import re
import secrets as random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from quantmint.pipeline.base import supervisor
from quantmint.pipeline.base.errors import SECRET, InvalidMeasurementError, StageError

#: Variables for identity and locale, libraries, visible devices, caches of compiled kernels, and network interfaces.
_PASSED = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | LANG | LANGUAGE | LC_\w+ | TZ | TMPDIR | LD_LIBRARY_PATH | PYTHONPATH
    | ROCM_PATH | ROCM_HOME | HIP_PATH | CUDA_HOME | CUDA_PATH | PYTORCH_ROCM_ARCH
    | (CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES | NVIDIA_DRIVER_CAPABILITIES
    | XDG_CACHE_HOME | VLLM_CACHE_ROOT | TORCHINDUCTOR_CACHE_DIR | TRITON_CACHE_DIR | AITER_JIT_DIR
    | MIOPEN_USER_DB_PATH | HF_HOME | HF_MODULES_CACHE | NCCL_SOCKET_IFNAME | GLOO_SOCKET_IFNAME
    """,
    re.VERBOSE,
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Variables that keep a server from using the Hub and from reporting usage."""
_GRACE_S = 5.0
_WATCH_S = 0.5
_POLL_S = 0.2
_QUOTED = 3  # lines of the log that an error quotes
_LOG_TAIL = 4 << 20


def child_environment(ours: Mapping[str, str], planned: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server's process: those of ``ours`` that locate things, then ``planned``; no secret.

    A variable that leaks in from a shell (``VLLM_...``, ``OMP_NUM_THREADS``) would change a measurement without
    changing its fingerprint. The model is a local folder: the server needs no token.
    """
    passed = {name: value for name, value in ours.items() if _PASSED.fullmatch(name)}
    return {name: value for name, value in (passed | dict(planned) | OFFLINE).items() if not SECRET.search(name)}


class Child:
    """A program that starts at once. At the exit of its context, it and all its descendants have ended.

    ``grace`` is the time between SIGTERM and SIGKILL in seconds; ``after`` are commands that the supervisor runs after
    the end, whatever caused it. Standard output goes to the file ``output`` if there is one, else to the log. The log
    is overwritten unless ``append``.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        log_path: Path,
        *,
        grace: float,
        after: Sequence[Sequence[str]] = (),
        output: Path | None = None,
        append: bool = False,
    ) -> None:
        self.log_path = log_path
        self._pid: int | None = None
        tidy = ["--after", json.dumps([list(argv) for argv in after])] if after else []
        aside = [] if output is None else ["--output", str(output)]
        supervised = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(grace), *tidy, *aside]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab" if append else "wb") as log:
            self._supervisor = subprocess.Popen(
                [*supervised, *map(str, command)],
                stdin=subprocess.PIPE,  # held open by us alone: its end is the order to stop
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Return the command's process id, not its supervisor's; None where it could not be started."""
        if self._pid is None and self._supervisor.stdout is not None:
            line = self._supervisor.stdout.readline()
            self._pid = int(line) if line else None
        return self._pid

    @property
    def supervisor_pid(self) -> int:
        """Return the supervisor's process id: the command and its descendants are below it."""
        return self._supervisor.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, None while it runs; 128 + N after signal N."""
        return self._supervisor.poll()

    def log(self, most: int = _LOG_TAIL) -> str:
        """Return the last ``most`` bytes of the log as text (default 4 MiB)."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - most))
            return log.read().decode("utf-8", errors="replace")

    def let_go(self, *, hurry: bool = False) -> None:
        """Order the command to stop, without waiting for it; ``hurry`` shortens its grace period to half a second."""
        if hurry:
            self._supervisor.send_signal(signal.SIGINT)
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the command and its descendants have ended; return the exit code.

        Raises `subprocess.TimeoutExpired` after ``timeout`` seconds. An interrupt ends the wait, not the command.
        """
        code = self._supervisor.wait(timeout)
        if self._supervisor.stdout is not None:
            self._supervisor.stdout.close()
        return code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        stop([self])


def stop(children: Iterable[Child]) -> None:
    """End all children at the same time and wait for them; after Ctrl-C without their full grace period."""
    ending = list(children)
    for child in ending:
        child.let_go(hurry=isinstance(sys.exception(), KeyboardInterrupt))
    for child in ending:
        child.wait()


def measuring_child(argv: Sequence[str], log: Path, *, env: Mapping[str, str], secrets: Collection[str] = ()) -> Child:
    """Start a program with our environment and ``env``.

    Of our secret variables it gets only those named in ``secrets``.
    """
    ours = {name: value for name, value in os.environ.items() if name in secrets or not SECRET.search(name)}
    return Child(argv, {**ours, **env}, log, grace=_GRACE_S, append=True)


def run_logged(
    argv: Sequence[str],
    log: Path,
    *,
    what: str,
    env: Mapping[str, str],
    watch: Callable[[str], None] = lambda _: None,
    started: Callable[[int], None] = lambda _: None,
    secrets: Collection[str] = (),
) -> None:
    """Run a `measuring_child` to its end; it is stopped, with its descendants, if an exception leaves this function.

    ``watch`` is called twice a second with the end of the log, ``started`` once with the supervisor's process id,
    ``what`` names the program in errors. Raises `StageError` with the last lines of the log if the program fails.
    """
    with measuring_child(argv, log, env=env, secrets=secrets) as child:
        started(child.supervisor_pid)
        while True:
            try:
                code = child.wait(_WATCH_S)
                break
            except subprocess.TimeoutExpired:
                watch(child.log(4096))
    if code != 0:
        raise failed(what, code, log)


def failed(what: str, code: int, log: Path) -> StageError:
    """Return the error for program ``what`` that ended with exit code ``code``, with the last lines of its log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return StageError(
        f"{what} ended with exit code {code}: {' | '.join(lines[-_QUOTED:]) or 'it printed nothing'}",
        hint=f"Its whole log: {log}",
    )


class Conversation:
    """A dialogue with a running program over a socket: one JSON message, one reply."""

    def __init__(self, lines: BufferedRWPair, process: Child, what: str, log: Path) -> None:
        self._lines = lines
        self._process = process
        self._what = what
        self._log = log

    def ask(
        self, message: Mapping[str, Any], news: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> Mapping[str, Any]:
        """Send a message and return the reply; ``news`` is called with every line that arrives before it.

        Raises `InvalidMeasurementError` with the program's reason if it refuses, and `StageError` if it ends before it
        replies.
        """
        try:
            self._lines.write(json.dumps(message).encode() + b"\n")
            self._lines.flush()
            while line := self._lines.readline():
                answer: Mapping[str, Any] = json.loads(line)
                if "refused" in answer:
                    raise InvalidMeasurementError(str(answer["refused"]))
                if "reply" in answer:
                    reply: Mapping[str, Any] = answer["reply"]
                    return reply
                news(answer)
        except OSError:
            pass  # it has ended, and its log says more than a broken pipe
        raise failed(self._what, self._process.wait(), self._log)


@contextmanager
def conversation(
    argv: Sequence[str], log: Path, *, what: str, env: Mapping[str, str], secrets: Collection[str] = ()
) -> Iterator[Conversation]:
    """Run a program within the block and yield a `Conversation` with it; at the exit, it has ended.

    The program's last argument is the socket's abstract name, with @ for the zero byte. ``secrets`` names the secret
    variables that it may have; ``what`` is its name in errors.
    """
    with ExitStack() as stack:
        with socket.socket(socket.AF_UNIX) as listener:
            name = f"quantmint-{random.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(1)
            listener.settimeout(_POLL_S)
            process = stack.enter_context(measuring_child([*argv, f"@{name}"], log, env=env, secrets=secrets))
            connection = stack.enter_context(_accepted(listener, process, what, log))
        yield Conversation(connection.makefile("rwb"), process, what, log)


def _accepted(listener: socket.socket, process: Child, what: str, log: Path) -> socket.socket:
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if process.exit_code is not None:
                raise failed(what, process.exit_code, log) from None
            continue
        if _user_of(connection) == os.geteuid():
            connection.settimeout(None)
            return connection
        connection.close()


def _user_of(connection: socket.socket) -> int:
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


@contextmanager
def stop_signals(order: Callable[[int], None]) -> Iterator[None]:
    """Within the block, route SIGINT, SIGTERM and SIGHUP to `order(signum)`, and to nothing else."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _frame: order(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
