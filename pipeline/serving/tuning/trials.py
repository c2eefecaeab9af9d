"""Run one trial: start a server from a plan, measure the workload's cells, read the log, and keep the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.records import Record
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import ServingError, StageError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.load_client import LoadClient
from quantmint.pipeline.serving.running.log import diagnose, scan_log
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.store.tree import Store

SERVER_LOG, CLIENT_LOG = "server.log", "bench.log"
STARTUP_TIMEOUT_S = 3600.0
_MARGIN = 1.1  # the next trial is expected to take this times the longest so far


class OutOfTimeError(Exception):
    """The budget ended during a trial, which then does not count."""


class Budget:
    """The wall clock of a sweep, including starts of servers and earlier runs; ``seconds`` None has no limit.

    ``earlier`` are the seconds that earlier runs of the sweep spent on trials in the store, ``longest`` the seconds of
    the longest completed trial.
    """

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.earlier, self.longest = seconds, 0.0, 0.0
        self._clock, self._began = clock, clock()

    @property
    def spent(self) -> float:
        """Seconds that the sweep has spent, in this run and earlier ones."""
        return self.earlier + self._clock() - self._began

    @property
    def remaining(self) -> float | None:
        """Seconds that remain, negative when overdrawn; None without a limit."""
        return None if self.seconds is None else self.seconds - self.spent

    @property
    def expected(self) -> float:
        """Seconds that the next trial is expected to take: the longest one's, with a margin; 0 before the first."""
        return _MARGIN * self.longest

    def affords(self, trials: int = 1) -> bool:
        """Return whether that many more trials are expected to end in time."""
        return self.remaining is None or (self.remaining > 0 and trials * self.expected <= self.remaining)

    def check(self, *_: object) -> None:
        """Raise `OutOfTimeError` when nothing remains."""
        if self.remaining is not None and self.remaining <= 0:
            raise OutOfTimeError


@dataclass(frozen=True, slots=True)
class TrialResult(Record):
    """The result of one trial: ``seconds`` is its wall time, ``started_seconds`` the time until the server answered.

    ``status`` is "failed" when the server did not start or a request was lost, "void" when the log shows that something
    else was measured. ``sweep`` is the id of the sweep that ran the trial.
    """

    status: Literal["ok", "failed", "void"]
    seconds: float
    sweep: str
    cells: Mapping[str, CellResult] = field(default_factory=dict)
    why: str | None = None
    fix: str | None = None
    started_seconds: float | None = None
    kv_tokens: int | None = None
    attention_backend: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """The sweep's id and budget, and in seconds the time to start and to stop a server."""

    sweep: str
    budget: Budget
    startup_timeout: float = STARTUP_TIMEOUT_S
    stop_grace: float = 15.0


@dataclass(slots=True)
class _CellRun:
    """A trial in progress: what was measured before it ended or failed."""

    cells: dict[str, CellResult] = field(default_factory=dict)
    started_seconds: float | None = None
    failure: StageError | MeasurementError | None = None


def measure(
    subject: TuningSubject, plan: LaunchPlan, folder: Path, log: Path, limits: TrialLimits, progress: Progress
) -> TrialResult:
    """Run a plan once and return its result, also when it fails; cells' JSON and a copy of ``log`` go to ``folder``.

    Raises `OutOfTimeError` when the budget ends first.
    """
    began = time.monotonic()
    run = _run_cells(subject, plan, folder, log, limits, progress)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    # A copy, because processes that still write to the log must not change an entry of the store.
    (folder / SERVER_LOG).write_text(text, encoding="utf-8")
    scan = scan_log(text)
    started = run.started_seconds
    result = TrialResult(
        status="ok",
        cells=run.cells,
        seconds=round(time.monotonic() - began, 3),
        sweep=limits.sweep,
        started_seconds=None if started is None else round(started, 3),
        kv_tokens=scan.kv_tokens,
        attention_backend=scan.attention_backend,
        notes=tuple(f"{finding.why}: {finding.line}" for finding in scan.cautions),
    )
    if (failure := run.failure) is not None:
        # The folder is renamed when the trial is committed, so its path means nothing to a reader.
        why = getattr(failure, "message", str(failure)).replace(f"{folder}/", "")
        return replace(result, status="failed", why=why, fix=diagnose(text).fix, cells={})
    if scan.invalid:
        why = "; ".join(f"{finding.why}: {finding.line}" for finding in scan.invalid)
        return replace(result, status="void", why=why)
    return result


def _run_cells(
    subject: TuningSubject, plan: LaunchPlan, folder: Path, log: Path, limits: TrialLimits, progress: Progress
) -> _CellRun:
    run, budget = _CellRun(), limits.budget
    remaining = budget.remaining
    timeout = limits.startup_timeout if remaining is None else max(1.0, min(limits.startup_timeout, remaining))
    try:
        launcher = LocalLauncher(subject.vllm.executable, stop_grace=limits.stop_grace)
        with launcher.launch(plan, log, startup_timeout=timeout) as server:
            run.started_seconds = server.started_seconds
            progress.say(f"ready after {server.started_seconds:.0f} s")
            client = LoadClient(subject.vllm, server, subject.model)
            for cell in subject.cells:
                budget.check()
                try:
                    result = client.measure(cell, folder=folder, log=folder / CLIENT_LOG, watch=budget.check)
                except (StageError, MeasurementError) as error:
                    raise _server_failure(server, cell, log) or error from error
                run.cells[cell.name] = result
    except (StageError, MeasurementError) as error:
        budget.check()  # a server whose start was cut short by the budget did not fail
        run.failure = error
    return run


def _server_failure(server: RunningServer, cell: Cell, log: Path) -> ServingError | None:
    """Return the cause why the server ended under a cell's load; None when it still answers."""
    try:
        server.get("/health", timeout=10)
    except ServingError:
        diagnosis = diagnose(log.read_text(encoding="utf-8", errors="replace"))
        return ServingError(f"the server ended under {cell.name}: {diagnosis.message}", hint=diagnosis.fix)
    return None


def measure_stored(
    subject: TuningSubject,
    store: Store,
    payload: Mapping[str, object],
    plan: Callable[[Path], LaunchPlan],
    check: Callable[[TrialResult, Path], None],
    limits: TrialLimits,
    progress: Progress,
) -> tuple[TrialResult, Path]:
    """Return the result of a plan and its entry's folder: from the store, or measured and committed now.

    ``plan`` and ``check`` get the folder; ``check`` may raise to reject the result. Nothing is committed when anything
    raises. The store moves a damaged record into quarantine and reports it.
    """
    stage, print_ = str(payload["stage"]), fingerprint(payload)
    with store.working(stage, print_, on_wait=progress.say) as work:
        if work.existing is not None:
            return TrialResult.from_json(work.existing.record.result), work.existing.path
        work.discard()
        started = datetime.now(UTC)
        log = store.root / "logs" / f"tune-{subject.name}.log"  # of the current trial; entries have copies
        result = measure(subject, plan(work.path), work.path, log, limits, progress)
        check(result, work.path)
        tools = {"vllm": subject.vllm.version}
        work.commit(payload=dict(payload), result=result.to_json(), started=started, tools=tools)
    return result, store.entry_path(stage, print_)
