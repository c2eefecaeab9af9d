"""Running the measuring programs of others as child processes, with a log and without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import StageError

_TAIL = 3  # lines of the log that an error quotes
_WATCH_S = 0.5
_WATCHED = 4096  # bytes of the log's end


def run_logged(
    argv: Sequence[str],
    log: Path,
    *,
    what: str,
    env: Mapping[str, str],
    watch: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a program to its end, its output in ``log``.

    It gets a process group of its own, which is ended whenever we leave early. ``watch`` is shown the end of the log
    twice a second. Raises `StageError` with the last lines of the log when the program fails.
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**_inherited(), **env},
            start_new_session=True,
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=_WATCH_S)
                    break
                except subprocess.TimeoutExpired:
                    watch(_end_of(log))
        except BaseException:
            _end(process)
            raise
    if code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise StageError(
            f"{what} ended with exit code {code}: {' | '.join(lines[-_TAIL:]) or 'it printed nothing'}",
            hint=f"Its whole log: {log}",
        )


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _WATCHED))
        return stream.read().decode("utf-8", errors="replace")


def _inherited() -> dict[str, str]:
    """Our environment without what no measuring program needs to know: tokens and keys."""
    secret = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")
    return {name: value for name, value in os.environ.items() if not any(part in name.upper() for part in secret)}


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
