"""Running the measuring programs of others as child processes, with a log and without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import StageError

_TAIL = 3  # lines of the log that an error quotes


def run_logged(argv: Sequence[str], log: Path, *, what: str, env: Mapping[str, str]) -> None:
    """Run a program to its end, its output in ``log``.

    It gets a process group of its own, which is ended whenever we leave early. Raises `StageError` with the last lines
    of the log when it fails.
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
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise StageError(
            f"{what} ended with exit code {code}: {' | '.join(lines[-_TAIL:]) or 'it printed nothing'}",
            hint=f"Its whole log: {log}",
        )


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
