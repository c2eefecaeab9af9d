"""Programs that run as our children, with a log and without leftovers: to their end, or asked things while they run.

A program that is asked is handed the name of a Unix socket on which it finds us. JSON lines go both ways; its last
words, should it end in between, are in its log. The name is an abstract one of Linux: nothing lies on a disk, so
nothing is left there when we are killed. Anybody on this machine could connect to it, so only our own user is listened
to.
"""

from __future__ import annotations

import json
import os
import re
import secrets as random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidMeasurementError, StageError
from pipeline.serving.launchers.child import SUPERVISOR

_TAIL = 3  # lines of the log that an error quotes
_SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS|ACCOUNT|STORAGE|PRIVATE)_?KEY|CONNECTION_?STRING"
    r"|WEBHOOK",  # who knows such an address may write to it
    re.IGNORECASE,
)
_GRACE_S = 5.0
_WATCH_S = 0.5
_WATCHED = 4096  # bytes of the log's end


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
    """Run a program to its end, its output in ``log``.

    It runs below a supervisor that ends it, and all that it started, whenever we leave early, however we leave.
    ``watch`` is shown the end of the log twice a second, ``started`` once the process that the program is a child of.
    ``secrets`` names the variables with tokens that the program may have; all others are kept from it. Raises
    `StageError` with the last lines of the log when the program fails.
    """
    with supervised(argv, log, env=env, secrets=secrets) as process:
        started(process.pid)
        while True:
            try:
                code = process.wait(timeout=_WATCH_S)
                break
            except subprocess.TimeoutExpired:
                watch(_end_of(log))
    if code != 0:
        raise failed(what, code, log)


@contextmanager
def supervised(
    argv: Sequence[str], log: Path, *, env: Mapping[str, str], secrets: Collection[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor of a program, whose exit code is the program's; see `run_logged`. All has ended at the exit."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(_GRACE_S), *argv],
            stdin=subprocess.PIPE,  # held open by us alone: its end is the order to stop
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env={**_inherited(secrets), **env},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.close()
            process.wait()


def failed(what: str, code: int, log: Path) -> StageError:
    """The error of a program that ended with an exit code, with the last lines of its log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return StageError(
        f"{what} ended with exit code {code}: {' | '.join(lines[-_TAIL:]) or 'it printed nothing'}",
        hint=f"Its whole log: {log}",
    )


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _WATCHED))
        return stream.read().decode("utf-8", errors="replace")


def _inherited(secrets: Collection[str]) -> dict[str, str]:
    """Our environment without the tokens and keys that the program was not given."""
    return {name: value for name, value in os.environ.items() if name in secrets or not _SECRET.search(name)}


_POLL_S = 0.2


class Conversation:
    """One question at a time. `StageError` where the program ends before it answers."""

    def __init__(self, lines: BufferedRWPair, process: subprocess.Popen[bytes], what: str, log: Path) -> None:
        self._lines = lines
        self._process = process
        self._what = what
        self._log = log

    def ask(
        self, message: Mapping[str, Any], news: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> Mapping[str, Any]:
        """The reply to a message; ``news`` is shown every line that comes before it.

        Raises `InvalidMeasurementError` with the program's reason where it refuses.
        """
        try:
            self._lines.write(json.dumps(message).encode() + b"\n")
            self._lines.flush()
            while line := self._lines.readline():
                told: Mapping[str, Any] = json.loads(line)
                if "refused" in told:
                    raise InvalidMeasurementError(str(told["refused"]))
                if "reply" in told:
                    reply: Mapping[str, Any] = told["reply"]
                    return reply
                news(told)
        except OSError:
            pass  # it has ended, and its log says more than a broken pipe
        raise failed(self._what, self._process.wait(), self._log)


@contextmanager
def conversation(
    argv: Sequence[str], log: Path, *, what: str, env: Mapping[str, str], secrets: Collection[str] = ()
) -> Iterator[Conversation]:
    """Start a program with the name of its socket, @ for the zero byte, as the last argument; it has ended at the exit.

    ``secrets`` names the variables with tokens that it may have, ``what`` is its name in errors.
    """
    with ExitStack() as stack:
        with socket.socket(socket.AF_UNIX) as listener:
            name = f"quantmint-{random.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(1)
            listener.settimeout(_POLL_S)
            process = stack.enter_context(supervised([*argv, f"@{name}"], log, env=env, secrets=secrets))
            connection = stack.enter_context(_accepted(listener, process, what, log))
        yield Conversation(connection.makefile("rwb"), process, what, log)


def _accepted(listener: socket.socket, process: subprocess.Popen[bytes], what: str, log: Path) -> socket.socket:
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                raise failed(what, process.returncode, log) from None
            continue
        if _user_of(connection) == os.geteuid():
            connection.settimeout(None)
            return connection
        connection.close()


def _user_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)
