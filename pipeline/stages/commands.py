"""Running the measuring programs of others as child processes, with a log and without leftovers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pipeline.errors import StageError
from pipeline.serving.launchers.child import SUPERVISOR

_TAIL = 3  # lines of the log that an error quotes
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)
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
    secrets: Collection[str] = (),
) -> None:
    """Run a program to its end, its output in ``log``.

    It runs below a supervisor that ends it, and all that it started, whenever we leave early, however we leave.
    ``watch`` is shown the end of the log twice a second. ``secrets`` names the variables with tokens that the program
    may have; all others are kept from it. Raises `StageError` with the last lines of the log when the program fails.
    """
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
            while True:
                try:
                    code = process.wait(timeout=_WATCH_S)
                    break
                except subprocess.TimeoutExpired:
                    watch(_end_of(log))
        finally:
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.close()
            process.wait()
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


def _inherited(secrets: Collection[str]) -> dict[str, str]:
    """Our environment without the tokens and keys that the program was not given."""
    return {name: value for name, value in os.environ.items() if name in secrets or not _SECRET.search(name)}
