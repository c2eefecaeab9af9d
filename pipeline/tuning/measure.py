"""One trial: a fresh server from the plan, the workload's cells, what the log says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from eval.bench import CellResult
from eval.errors import MeasurementError
from eval.workloads import Cell
from pipeline.errors import ServingError, StageError
from pipeline.measuring.cell import run_cell
from pipeline.progress import Progress
from pipeline.serving.launchers.local import LocalLauncher
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.running.diagnosis import diagnose
from pipeline.serving.running.logscan import scan_log
from pipeline.serving.running.server import Server
from pipeline.tuning.results import Outcome
from pipeline.tuning.subject import Subject

SERVER_LOG, CLIENT_LOG = "server.log", "bench.log"
STARTUP_TIMEOUT_S = 3600.0
Launch: TypeAlias = Callable[[LaunchPlan, Path, float], AbstractContextManager[Server]]
"""Serve a plan, with its log in a file, if it answers within so many seconds."""


class OutOfTimeError(Exception):
    """The budget ended in the middle of a trial, which is then no trial."""


class Deadline:
    """A moment of the monotonic clock that no trial may pass; None for never."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then."""
        return None if self._at is None else self._at - time.monotonic()

    def check(self, *_: object) -> None:
        """Raise `OutOfTimeError` when it has passed."""
        if self.left is not None and self.left <= 0:
            raise OutOfTimeError


def local_launch(subject: Subject, *, stop_grace: float = 15.0) -> Launch:
    """Servers on this machine, one at a time."""
    launcher = LocalLauncher(subject.vllm.executable, stop_grace=stop_grace)
    return lambda plan, log, timeout: launcher.launch(plan, log, startup_timeout=timeout)


def measure(
    subject: Subject,
    plan: LaunchPlan,
    folder: Path,
    *,
    log: Path,
    launch: Launch,
    sweep: str,
    deadline: Deadline,
    startup_timeout: float,
    progress: Progress,
) -> Outcome:
    """Run a plan once; the JSON of each cell stays in ``folder``, as does the log that the server has in ``log``.

    A server that does not start, dies or loses requests is an outcome, not an error. Raises `OutOfTimeError` at the
    deadline.
    """
    began = time.monotonic()
    patience = startup_timeout if deadline.left is None else max(1.0, min(startup_timeout, deadline.left))
    cells: dict[str, CellResult] = {}
    started: float | None = None
    failure: StageError | MeasurementError | None = None
    try:
        with launch(plan, log, patience) as server:
            started = server.started_seconds
            progress.say(f"ready after {started:.0f} s")
            for cell in subject.cells:
                deadline.check()
                try:
                    cells[cell.name] = _cell(subject, server, cell, folder, deadline)
                except (StageError, MeasurementError) as error:
                    raise _cause(server, cell, log) or error from error
    except (StageError, MeasurementError) as error:
        deadline.check()  # a server that was given less time than it needs did not fail
        failure = error
    seconds = time.monotonic() - began
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    (folder / SERVER_LOG).write_text(text, encoding="utf-8")  # a copy: whoever still writes must not reach an entry
    scan = scan_log(text)
    outcome = Outcome(
        status="ok",
        cells=cells,
        seconds=round(seconds, 3),
        sweep=sweep,
        started_seconds=None if started is None else round(started, 3),
        kv_tokens=scan.kv_tokens,
        attention_backend=scan.attention_backend,
        notes=tuple(f"{finding.why}: {finding.line}" for finding in scan.cautions),
    )
    if failure is not None:
        why, fix = _words(failure, folder)
        return replace(outcome, status="failed", why=why, fix=fix, cells={})
    if scan.invalid:
        why = "; ".join(f"{finding.why}: {finding.line}" for finding in scan.invalid)
        return replace(outcome, status="void", why=why)
    return outcome


def _cell(subject: Subject, server: Server, cell: Cell, folder: Path, deadline: Deadline) -> CellResult:
    return run_cell(
        subject.vllm,
        cell,
        server,
        model=subject.model,
        folder=folder,
        log=folder / CLIENT_LOG,
        watch=deadline.check,
    )


def _cause(server: Server, cell: Cell, log: Path) -> ServingError | None:
    """What ended the server, where it was the server that failed and not the load."""
    try:
        server.get("/health", timeout=10)
    except ServingError:
        found = diagnose(log.read_text(encoding="utf-8", errors="replace"))
        return ServingError(f"the server ended under {cell.name}: {found.message}", hint=found.fix)
    return None


def _words(failure: Exception, folder: Path) -> tuple[str, str | None]:
    """The cause and the fix; the folder is left out, for it is renamed when the trial is committed."""
    message = getattr(failure, "message", str(failure)).replace(f"{folder}/", "")
    hint = getattr(failure, "hint", None)
    fix = None if hint is None else hint.split("; its log:")[0].replace(f"{folder}/", "")
    return message, None if fix is None or fix.startswith(("its log", "Its whole log", "log:")) else fix
