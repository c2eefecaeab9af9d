"""One trial: a fresh server from a plan, the workload's cells, what its log says; kept in the store, made once."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.records import Record
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import ServingError, StageError
from quantmint.pipeline.base.progress import Progress, Reporter
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.load_client import LoadClient
from quantmint.pipeline.serving.running.log import diagnose, scan_log
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.serving.tuning.space import BASE, TUNED_FILE, TunedKernels, TuningSubject, with_tunableop
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.tree import Store

SERVER_LOG, CLIENT_LOG = "server.log", "bench.log"
STARTUP_TIMEOUT_S = 3600.0
_MARGIN = 1.1  # how much longer than the longest so far the next trial may take


class OutOfTimeError(Exception):
    """The budget ended in the middle of a trial, which is then no trial."""


class Budget:
    """Wall clock of a sweep, starts and its earlier runs included; ``seconds`` is None where there is no limit.

    ``earlier`` is what runs before this one spent on trials that are taken from the store; ``longest`` are the seconds
    of the longest trial that ran to its end, whoever paid for it.
    """

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.earlier, self.longest = seconds, 0.0, 0.0
        self._clock, self._began = clock, clock()

    @property
    def spent(self) -> float:
        """Seconds spent by this sweep, in this run and before."""
        return self.earlier + self._clock() - self._began

    @property
    def left(self) -> float | None:
        """Seconds that are left, below zero where it was overdrawn; None without a limit."""
        return None if self.seconds is None else self.seconds - self.spent

    @property
    def expected(self) -> float:
        """Seconds that the next trial is expected to take; 0 before anything was seen."""
        return _MARGIN * self.longest

    def affords(self, trials: int = 1) -> bool:
        """Whether so many more trials are expected to end in time."""
        return self.left is None or (self.left > 0 and trials * self.expected <= self.left)

    def check(self, *_: object) -> None:
        """Raise `OutOfTimeError` when nothing is left."""
        if self.left is not None and self.left <= 0:
            raise OutOfTimeError


@dataclass(frozen=True, slots=True)
class TrialResult(Record):
    """One trial. ``seconds`` is its whole wall time, ``started_seconds`` until the server answered.

    ``status`` is "failed" where the server did not start or a request did not come back; "void" where the log says that
    the numbers do not mean what they should. ``sweep`` names the sweep that paid for it.
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


def measure(
    subject: TuningSubject,
    plan: LaunchPlan,
    folder: Path,
    *,
    log: Path,
    sweep: str,
    budget: Budget,
    progress: Progress,
    startup_timeout: float = STARTUP_TIMEOUT_S,
    stop_grace: float = 15.0,
) -> TrialResult:
    """Run a plan once; its cells' JSON and log stay in ``folder``. A failure is an outcome; raises `OutOfTimeError`."""
    began = time.monotonic()
    patience = startup_timeout if budget.left is None else max(1.0, min(startup_timeout, budget.left))
    cells: dict[str, CellResult] = {}
    started: float | None = None
    failure: StageError | MeasurementError | None = None
    try:
        launcher = LocalLauncher(subject.vllm.executable, stop_grace=stop_grace)
        with launcher.launch(plan, log, startup_timeout=patience) as server:
            started = server.started_seconds
            progress.say(f"ready after {started:.0f} s")
            for cell in subject.cells:
                budget.check()
                client = LoadClient(subject.vllm, server, subject.model)
                try:
                    cells[cell.name] = client.measure(cell, folder=folder, log=folder / CLIENT_LOG, watch=budget.check)
                except (StageError, MeasurementError) as error:
                    raise _cause(server, cell, log) or error from error
    except (StageError, MeasurementError) as error:
        budget.check()  # a server that was given less time than it needs did not fail
        failure = error
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    (folder / SERVER_LOG).write_text(text, encoding="utf-8")  # a copy: whoever still writes must not reach an entry
    scan = scan_log(text)
    outcome = TrialResult(
        status="ok",
        cells=cells,
        seconds=round(time.monotonic() - began, 3),
        sweep=sweep,
        started_seconds=None if started is None else round(started, 3),
        kv_tokens=scan.kv_tokens,
        attention_backend=scan.attention_backend,
        notes=tuple(f"{finding.why}: {finding.line}" for finding in scan.cautions),
    )
    if failure is not None:
        # The folder is renamed when the trial is committed.
        why = getattr(failure, "message", str(failure)).replace(f"{folder}/", "")
        return replace(outcome, status="failed", why=why, fix=diagnose(text).fix, cells={})
    if scan.invalid:
        why = "; ".join(f"{finding.why}: {finding.line}" for finding in scan.invalid)
        return replace(outcome, status="void", why=why)
    return outcome


def _cause(server: RunningServer, cell: Cell, log: Path) -> ServingError | None:
    """What ended the server, where it was the server that failed and not the load."""
    try:
        server.get("/health", timeout=10)
    except ServingError:
        found = diagnose(log.read_text(encoding="utf-8", errors="replace"))
        return ServingError(f"the server ended under {cell.name}: {found.message}", hint=found.fix)
    return None


def once(
    subject: TuningSubject,
    store: Store,
    payload: dict[str, Any],
    plan: Callable[[Path], LaunchPlan],
    check: Callable[[TrialResult, Path], None],
    *,
    progress: Progress,
    **how: Any,
) -> tuple[Mapping[str, Any], Path]:
    """The record of a measured plan and its entry's folder, which the plan and ``check`` get; ``how`` is `measure`'s.

    What raises leaves nothing that counts. A damaged record is put into quarantine by the store, which says so.
    """
    stage, print_ = payload["stage"], fingerprint(payload)
    with store.working(stage, print_, on_wait=progress.say) as work:
        if work.existing is not None:
            return work.existing.record.result, work.existing.path
        work.discard()
        started = datetime.now(UTC)
        # What is over is in the entry of its trial.
        log = store.root / "logs" / f"tune-{subject.name}.log"
        outcome = measure(subject, plan(work.path), work.path, log=log, progress=progress, **how)
        check(outcome, work.path)
        tools = {"vllm": subject.vllm.version}
        work.commit(payload=payload, result=outcome.to_json(), started=started, tools=tools)
    return outcome.to_json(), store.entry_path(stage, print_)


FOLDER = "tunableop"
STOP_GRACE_S = 120.0


def read_tuned(folder: Path, devices: int) -> TunedKernels:
    """Read the files of a pass over ``devices`` devices; StageError for one that PyTorch would not use."""
    shapes: dict[str, int] = {}
    digests = {}
    for device in range(devices):
        path = folder / (TUNED_FILE % device)
        if not path.is_file():
            raise StageError(f"TunableOp wrote no {path.name} for device {device}", hint=f"see the log beside {folder}")
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            tuned = {(row[0], row[1]) for row in csv.reader(file) if len(row) >= 3 and row[0] != "Validator"}
        if not tuned:
            raise StageError(f"{path} has no tuned shape: PyTorch would not use it")
        shapes[str(device)] = len(tuned)
        digests[path.name] = sha256_of(path)
    return TunedKernels(folder, fingerprint(digests), shapes)


def first_pass(
    subject: TuningSubject, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool
) -> TunedKernels:
    """Tune the workload's matrix products into ``out``/tunableop. ServingError, StageError, `OutOfTimeError`."""
    layout = subject.plan(BASE).layout
    devices = layout.tensor * layout.pipeline
    base = subject.plan(BASE)
    payload = subject.payload_of(with_tunableop(base, Path(), search=True)) | {"stage": FOLDER}
    entry = store.find(FOLDER, fingerprint(payload))
    if entry is None:
        reporter.say("TunableOp searches for the fastest matrix kernels of this workload")
    elif redo:
        store.retire(entry)
    else:
        budget.earlier += float(str(entry.record.result["seconds"]))

    def check(outcome: TrialResult, folder: Path) -> None:
        if outcome.status == "failed":
            raise ServingError(f"the TunableOp pass failed: {outcome.why}", hint=outcome.fix)
        read_tuned(folder, devices)

    search = partial(with_tunableop, base, search=True)
    how: dict[str, Any] = {"sweep": FOLDER, "budget": budget, "stop_grace": STOP_GRACE_S}
    _, made = once(subject, store, payload, search, check, progress=reporter, **how)
    kept = out / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("*.csv"):
        old.unlink()
    for file in sorted(made.glob("*.csv")):
        shutil.copyfile(file, kept / file.name)
    tuned = read_tuned(kept.resolve(), devices)
    reporter.say(f"TunableOp: {sum(tuned.shapes.values())} shapes on {devices} devices")
    return tuned
