"""A program of ours that is asked things while it runs, and ends when we do.

It runs as `run_logged` runs others, and is handed the name of a Unix socket on which it finds us. JSON lines go both
ways; its last words, should it end in between, are in its log. The name is an abstract one of Linux: nothing lies on a
disk, so nothing is left there when we are killed. Anybody on this machine could connect to it, so only our own user is
listened to.
"""

from __future__ import annotations

import json
import os
import secrets as random
import socket
import struct
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from eval.errors import MeasurementError
from pipeline.stages.commands import failed, supervised

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

        Raises `MeasurementError` with the program's reason where it refuses.
        """
        try:
            self._lines.write(json.dumps(message).encode() + b"\n")
            self._lines.flush()
            while line := self._lines.readline():
                told: Mapping[str, Any] = json.loads(line)
                if "refused" in told:
                    raise MeasurementError(str(told["refused"]))
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
