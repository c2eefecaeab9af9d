"""One attempt at a recipe: a child process, its log, and what it ended with."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.fleet.quoting import last_line, quotable
from pipeline.refresh.state import folder_of
from pipeline.serving.launchers.child import Child
from pipeline.store.disk import disk_errors
from pipeline.submit.ray import RUNS

_KEPT: Final = 5
_POLL_S: Final = 0.1
_LINE: Final = 4096  # bytes
_STAGE: Final = re.compile(rb"^\[(\d+/\d+)\] ([^\s:]+): started$", re.MULTILINE)
_ROOM: Final = re.compile(rb"\S+ " + RUNS.encode() + rb"$", re.MULTILINE)
_FINISHED: Final = re.compile(rb"\[\d+/\d+\] ([!-~]+): done in ")
_NOT_A_CHILDS: Final = re.compile(r"QUANTMINT_WEBHOOK\w*")


@dataclass(frozen=True, slots=True)
class Attempted:
    """How a child ended.

    ``exit_code`` is its own, 128 + N after signal N. ``answer`` is the JSON object that it printed, {} for none.
    ``seconds`` are those in which it ran: none of a wait for room in a cluster. ``cut_short``: we ended it. ``error``
    is one line, "" where there is none to tell. ``finished`` are keys of stages that it made to their end.
    """

    exit_code: int
    answer: Mapping[str, Any]
    seconds: float
    log: Path
    cut_short: bool = False
    error: str = ""
    finished: frozenset[str] = frozenset()

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
        return self.answer.get("transient") is True

    @property
    def killed(self) -> bool:
        """Whether a signal ended it that was not ours."""
        return not self.cut_short and not 0 <= self.exit_code < 128

    @property
    def places(self) -> tuple[Mapping[str, object], ...]:
        """Where its release is now, as `quantmint run --json` says it."""
        found = self.answer.get("published")
        return tuple(place for place in found if isinstance(place, dict)) if isinstance(found, list) else ()


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

    ``queues``: it asks a cluster for room first, and its time begins when it says that it has found it. What it starts
    ends with it, and with us. ``on_stage`` hears ``3/12 calibrate``. Raises `StoreError` where the log
    cannot be written.
    """
    first = time.monotonic()
    began, room = None if queues else first, threading.Event()
    printed = log.with_suffix(".out")
    with disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        child = Child(argv, environment, log, grace=grace_s, output=printed)
    seen, late = 0, False
    try:
        while child.exit_code is None and not stop.wait(_POLL_S):
            late = limit_s is not None and began is not None and time.monotonic() - began > limit_s
            if late:
                break
            seen = _tell_stage(log, seen, on_stage, room.set)
            if began is None and room.is_set():
                began = time.monotonic()
        cut = child.exit_code is None
    finally:
        child.let_go()
        child.wait()
    if began is None and not cut:  # too short for anybody to see it run
        began = first
    seconds = 0.0 if began is None else time.monotonic() - began
    code = child.exit_code
    answer = _answer(printed)
    printed.unlink(missing_ok=True)
    code = 5 if code is None else code
    if late and cut:
        error = f"ended after {seconds / 3600:.2g} h, which is as long as refresh.max_hours lets it run"
    elif cut or "verdict" in answer:
        error = ""
    elif "error" in answer:
        error = quotable(str(answer["error"]), environment)
    else:
        said = last_line(log, environment)
        how = f"signal {code - 128 if code > 128 else -code}" if not 0 <= code < 128 else f"exit code {code}"
        error = f"ended by {how}" + (f": {said}" if said else "")
    return Attempted(code, answer, seconds, log, cut, error, _finished(log))


def child_variables(ours: Mapping[str, str]) -> dict[str, str]:
    """Our environment for a child: it fetches, signs and publishes as a person's run does, but tells nobody."""
    return {name: value for name, value in ours.items() if not _NOT_A_CHILDS.fullmatch(name)}


def new_log(root: Path, name: str) -> Path:
    """A fresh log of a recipe; of those before, the newest four stay. Raises `StoreError`."""
    folder = folder_of(root) / "logs" / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.log"))[: 1 - _KEPT]:
            old.unlink(missing_ok=True)
        for left in folder.glob("*.out"):  # of a child whose fleet was killed: we hold the recipe's lock
            left.unlink(missing_ok=True)
    return folder / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}.log"


def _tell_stage(
    log: Path, seen: int, on_stage: Callable[[str], None], on_room: Callable[[], None] = lambda: None
) -> int:
    """Tell the newest stage of what the log has grown since ``seen`` bytes, and room; returns where to go on."""
    try:
        size = os.stat(log).st_size  # noqa: PTH116 - ten times a second
        if size == seen:
            return seen
        with log.open("rb") as stream:
            stream.seek(seen)
            grown = stream.read(size - seen)
    except OSError:
        return seen
    # A library's bar writes for hours without an end of line: only the last of that may become a line of ours.
    whole = grown.rfind(b"\n") + 1 or max(0, len(grown) - _LINE)
    if _ROOM.search(grown[:whole]):
        on_room()
    found = _STAGE.findall(grown[:whole])
    if found:
        on_stage(b" ".join(found[-1]).decode(errors="replace"))
    return seen + whole


def _finished(log: Path) -> frozenset[str]:
    try:
        with log.open("rb") as stream:
            return frozenset(found[1].decode() for line in stream if (found := _FINISHED.match(line)))
    except OSError:
        return frozenset()


def _answer(printed: Path) -> dict[str, Any]:
    """The last JSON object that a child printed; {} for none."""
    try:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return {}
    for candidate in (text, text[text.rfind("\n{") + 1 :]):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
