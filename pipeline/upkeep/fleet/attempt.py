"""One attempt at a recipe: a child process, its log, and what it ended with."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from quantmint.pipeline.base.errors import redact
from quantmint.pipeline.base.processes import Child
from quantmint.pipeline.base.progress import CONTROL
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.upkeep.fleet.records import folder_of

_LOGS: Final = 5
_LINE: Final = 4096  # bytes
_STAGE: Final = re.compile(rb"\[(\d+/\d+)\] ([^\s:]+): started")
_LONGEST: Final = 2000
_TAIL: Final = 65536


@dataclass(frozen=True, slots=True)
class Attempted:
    """The end of a child process.

    ``exit_code`` is the child's, 128 + N after signal N. ``answer`` is the JSON object that it printed, {} without one.
    ``seconds`` is its running time without a wait for room in a cluster. ``cut_short`` says that we ended it. ``error``
    is one line, "" without an error.
    """

    exit_code: int
    answer: Mapping[str, Any]
    seconds: float
    log: Path
    cut_short: bool = False
    error: str = ""

    @property
    def judged(self) -> bool:
        """Return whether the child ended by itself with a result, whatever its verdict, and not with an error."""
        return not self.cut_short and "verdict" in self.answer and self.exit_code in {0, 1, 3, 4}

    @property
    def failure(self) -> int:
        """Return the exit code of a child that was not judged: its own of 1, 2 and 4 if it printed an error, else 5."""
        spoke = "error" in self.answer and not self.cut_short
        return self.exit_code if spoke and self.exit_code in {1, 2, 4} else 5

    @property
    def transient(self) -> bool:
        """Return whether the child printed that the same command may succeed later."""
        return not self.cut_short and self.answer.get("transient") is True


class RecipeProcess:
    """A child process that works on a recipe, from its start on. Raises `StoreError` if the log cannot be written.

    It is ended after ``limit_s`` seconds (None: no limit), with ``grace_s`` seconds between SIGTERM and SIGKILL; its
    own children end with it. With ``queues`` it waits in a cluster's queue first, and its time begins with its first
    stage.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        limit_s: float | None,
        queues: bool = False,
    ) -> None:
        self._log, self._environment, self._limit_s = log, environment, limit_s
        self._began = None if queues else time.monotonic()
        self._printed, self._line = log.with_suffix(".out"), b""
        self._late = self._cut = False
        with disk_errors(log):
            self._child = Child(argv, environment, log, grace=grace_s, output=self._printed)
            self._stream = log.open("rb")

    @property
    def running(self) -> bool:
        """Return whether the child runs."""
        return self._child.exit_code is None

    def watch(self) -> str | None:
        """Return the newest stage that began since the last call, as ``3/12 calibrate``; end a child that is late."""
        *lines, line = (self._line + self._stream.read()).split(b"\n")
        self._line = line[-_LINE:]  # a library's bar writes for hours without an end of line
        stages = [match for match in map(_STAGE.match, lines) if match is not None]
        if stages:
            self._began = self._began or time.monotonic()
        if self._limit_s is not None and self.running and self._seconds() > self._limit_s:
            self._late = True
            self.stop()
        return b" ".join(stages[-1].groups()).decode(errors="replace") if stages else None

    def stop(self) -> None:
        """Order the child to end, without waiting for it."""
        self._cut = self._cut or self.running
        self._child.let_go()

    def close(self) -> int:
        """End the child if it runs, and wait for its end; return its exit code."""
        self._child.let_go()
        self._stream.close()
        return self._child.wait()

    def result(self) -> Attempted:
        """Wait until the child has ended; return what it ended with."""
        code = self.close()
        seconds, answer, error = self._seconds(), _answer(self._printed), ""
        self._printed.unlink(missing_ok=True)
        if self._late and self._cut:
            error = f"ended after {seconds / 3600:.2g} h, which is as long as refresh.max_hours lets it run"
        elif not self._cut and "verdict" not in answer:
            how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
            line = last_line(self._child.log(_TAIL), self._environment)
            error = f"ended by {how}: {line}" if line else f"ended by {how}"
            error = quotable(str(answer.get("error", error)), self._environment)
        return Attempted(code, answer, seconds, self._log, self._cut, error)

    def _seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


def new_log(root: Path, name: str) -> Path:
    """Return the path of a new log of a recipe; of its earlier logs keep the newest four. Raises `StoreError`."""
    folder = folder_of(root) / "logs" / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # An output that is there is of a child whose fleet was killed: we hold the recipe's lock.
        for old in (*sorted(folder.glob("*.log"))[: 1 - _LOGS], *folder.glob("*.out")):
            old.unlink(missing_ok=True)
    return folder / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}.log"


def quotable(text: str, environment: Mapping[str, str]) -> str:
    """Return a message as one shortened paragraph without control characters and without secrets of ``environment``."""
    return redact(" ".join(CONTROL.sub("", text).split()), environment)[:_LONGEST]


def last_line(log: str, environment: Mapping[str, str]) -> str:
    """Return the last line of a log that is not blank, as `quotable` returns it; "" without one."""
    lines = [line for line in map(str.strip, CONTROL.sub("", log.replace("\r", "\n")).splitlines()) if line]
    return quotable(lines[-1], environment) if lines else ""


def _answer(printed: Path) -> dict[str, Any]:
    try:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        answer = json.loads(text[text.rfind("\n{") + 1 :])
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
