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
    """How a child ended.

    ``exit_code`` is its own, 128 + N after signal N. ``answer`` is the JSON object that it printed, {} for none.
    ``seconds`` are those in which it ran: none of a wait for room in a cluster. ``cut_short``: we ended it. ``error``
    is one line, "" where there is none to tell.
    """

    exit_code: int
    answer: Mapping[str, Any]
    seconds: float
    log: Path
    cut_short: bool = False
    error: str = ""

    @property
    def verdict(self) -> str | None:
        """The gate's word; None where it did not come to that."""
        found = self.answer.get("verdict")
        return found if isinstance(found, str) else None

    @property
    def judged(self) -> bool:
        """Whether it came to its own end and told of it, whatever that was; an error is none."""
        return not self.cut_short and "verdict" in self.answer and self.exit_code in {0, 1, 3, 4}

    @property
    def failure(self) -> int:
        """The exit code of one that was not judged; a child without words broke, whatever its code."""
        spoke = "error" in self.answer and not self.cut_short
        return self.exit_code if spoke and self.exit_code in {1, 2, 4} else 5

    @property
    def transient(self) -> bool:
        """Whether it says that the same command may succeed in a while."""
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
    """Run a child to its end, or until ``stop`` is set, or for ``limit_s`` seconds.

    ``queues``: it asks a cluster for room first, and its time begins with its first stage. What it starts ends with it,
    and with us. ``on_stage`` hears ``3/12 calibrate``. Raises `StoreError` where the log cannot be written.
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
    """A fresh log of a recipe; of those before, the newest four stay. Raises `StoreError`."""
    folder = folder_of(root) / "logs" / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # An output that is there is of a child whose fleet was killed: we hold the recipe's lock.
        for old in (*sorted(folder.glob("*.log"))[: 1 - _KEPT], *folder.glob("*.out")):
            old.unlink(missing_ok=True)
    return folder / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}.log"


def quotable(text: str, environment: Mapping[str, str]) -> str:
    """A message as one paragraph without control characters and secrets."""
    return redact(" ".join(CONTROL.sub("", text).split()), environment)[:_LONGEST]


def last_line(log: str, environment: Mapping[str, str]) -> str:
    """The last line of a log that says something, fit to be quoted; "" for none."""
    lines = [line for line in map(str.strip, CONTROL.sub("", log.replace("\r", "\n")).splitlines()) if line]
    return quotable(lines[-1], environment) if lines else ""


def _answer(printed: Path) -> dict[str, Any]:
    try:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        found = json.loads(text[text.rfind("\n{") + 1 :])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
