"""A command that ends when its owner does: a child below `supervisor.py`, its output in a file.

The supervisor ends the whole process group when this process lets go of a pipe, which the kernel does for it even
after SIGKILL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.serving.running import supervisor

SUPERVISOR = Path(supervisor.__file__)
"""The script that ends a child with its owner; its docstring says how it is called."""
_LOG_TAIL = 4 << 20


class Child:
    """Starts at once. ``grace`` is how many seconds it gets between SIGTERM and SIGKILL.

    ``after`` are commands that the supervisor runs when all is over, whoever ended it. Standard output goes to the log
    too, or to the file ``output``.
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
    ) -> None:
        self.log_path = log_path
        self._pid: int | None = None
        tidy = ["--after", json.dumps([list(argv) for argv in after])] if after else []
        aside = [] if output is None else ["--output", str(output)]
        supervised = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(grace), *tidy, *aside]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
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
        """The command's process, not its supervisor's; None where it could not be started."""
        if self._pid is None and self._supervisor.stdout is not None:
            line = self._supervisor.stdout.readline()
            self._pid = int(line) if line else None
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N after signal N."""
        return self._supervisor.poll()

    def log(self) -> str:
        """The last 4 MiB of what it wrote."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL))
            return log.read().decode("utf-8", errors="replace")

    def let_go(self) -> None:
        """Order it to stop, without waiting for it."""
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()

    def wait(self) -> None:
        """Wait until every process has ended; an interrupt stops only the wait."""
        self._supervisor.wait()
        if self._supervisor.stdout is not None:
            self._supervisor.stdout.close()


def stop(children: Iterable[Child]) -> None:
    """End them all, at the same time."""
    ending = list(children)
    for child in ending:
        child.let_go()
    for child in ending:
        child.wait()
