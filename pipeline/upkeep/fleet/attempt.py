"""One attempt at a recipe: a child process, its log, and what it ended with."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from quantmint.pipeline.base.errors import redact
from quantmint.pipeline.base.processes import Child
from quantmint.pipeline.base.progress import CONTROL
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.upkeep.fleet.events import folder_of

_KEPT: Final = 5
_POLL_S: Final = 0.1
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
    def verdict(self) -> str | None:
        """Return the gate's verdict; None if the child did not print one."""
        found = self.answer.get("verdict")
        return found if isinstance(found, str) else None

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


def attempt(
    argv: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str],
    grace_s: float,
    limit_s: float | None,
    stop: threading.Event,
    on_stage: Callable[[str], None],
    queues: bool = False,
) -> Attempted:
    """Run a child until it ends, until ``stop`` is set, or for ``limit_s`` seconds (None: no limit).

    With ``queues`` the child waits in a cluster's queue first, and its time begins with its first stage. A child that
    we end gets ``grace_s`` seconds between SIGTERM and SIGKILL; its own children end with it. ``on_stage`` is called
    with texts such as ``3/12 calibrate``. Raises `StoreError` if the log cannot be written.
    """
    began = None if queues else time.monotonic()
    printed = log.with_suffix(".out")
    with disk_errors(log):
        child = Child(argv, environment, log, grace=grace_s, output=printed)
    try:
        late, line = False, b""
        with log.open("rb") as stream:
            while child.exit_code is None and not late and not stop.wait(_POLL_S):
                *lines, line = (line + stream.read()).split(b"\n")
                line = line[-_LINE:]  # a library's bar writes for hours without an end of line
                if found := [stage for stage in map(_STAGE.match, lines) if stage is not None]:
                    began = began or time.monotonic()
                    on_stage(b" ".join(found[-1].groups()).decode(errors="replace"))
                late = limit_s is not None and began is not None and time.monotonic() - began > limit_s
        cut = child.exit_code is None
    finally:
        child.let_go()
        child.wait()
    seconds = 0.0 if began is None else time.monotonic() - began
    code = 5 if child.exit_code is None else child.exit_code
    answer = _answer(printed)
    printed.unlink(missing_ok=True)
    if late and cut:
        error = f"ended after {seconds / 3600:.2g} h, which is as long as refresh.max_hours lets it run"
    elif cut or "verdict" in answer:
        error = ""
    elif "error" in answer:
        error = quotable(str(answer["error"]), environment)
    else:
        said = last_line(child.log(_TAIL), environment)
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        error = f"ended by {how}" + (f": {said}" if said else "")
    return Attempted(code, answer, seconds, log, cut, error)


def new_log(root: Path, name: str) -> Path:
    """Return the path of a new log of a recipe; of its earlier logs keep the newest four. Raises `StoreError`."""
    folder = folder_of(root) / "logs" / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # An output that is there is of a child whose fleet was killed: we hold the recipe's lock.
        for old in (*sorted(folder.glob("*.log"))[: 1 - _KEPT], *folder.glob("*.out")):
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
        found = json.loads(text[text.rfind("\n{") + 1 :])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
