"""Running the measuring programs of others as child processes, with a log and without leftovers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import StageError
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
