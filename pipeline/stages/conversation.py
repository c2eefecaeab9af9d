"""A program of ours that is asked things while it runs, and ends when we do.

It runs as `run_logged` runs others, and is handed the path of a Unix socket on which it finds us. JSON lines go both
ways; its last words, should it end in between, are in its log.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
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
    """Start a program with the path of its socket as the last argument; it has ended at the exit.

    ``secrets`` names the variables with tokens that it may have, ``what`` is its name in errors.
    """
    with ExitStack() as stack:
        # Not below the store: the path of a socket has room for some hundred characters. It is not needed for long.
        with tempfile.TemporaryDirectory(prefix="quantmint-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder) / "socket")
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(_POLL_S)
            process = stack.enter_context(supervised([*argv, path], log, env=env, secrets=secrets))
            connection = stack.enter_context(_accepted(listener, process, what, log))
        yield Conversation(connection.makefile("rwb"), process, what, log)


def _accepted(listener: socket.socket, process: subprocess.Popen[bytes], what: str, log: Path) -> socket.socket:
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                raise failed(what, process.returncode, log) from None
        else:
            connection.settimeout(None)
            return connection
