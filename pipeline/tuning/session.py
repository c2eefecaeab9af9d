"""One call of `quantmint tune`: the locks around a sweep, the pass before it, the files after it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.locks import Lock
from pipeline.progress import Reporter
from pipeline.store.disk import disk_errors
from pipeline.store.runs import RunLog
from pipeline.store.tree import Store
from pipeline.tuning.budget import Budget
from pipeline.tuning.first_pass import FOLDER, first_pass
from pipeline.tuning.measure import Launch, OutOfTimeError, local_launch
from pipeline.tuning.page import write
from pipeline.tuning.report import Report, report
from pipeline.tuning.space import TUNABLEOP, Trial
from pipeline.tuning.subject import STAGE
from pipeline.tuning.sweep import Sweep, planned, run_sweep
from pipeline.tuning.trials import Trials
from pipeline.tuning.tunableop import FILE, STOP_GRACE_S

LOCK = "tuning.lock"


def tune(
    sweep: Sweep,
    store: Store,
    budget: Budget,
    reporter: Reporter,
    out: Path,
    *,
    existing: dict[str, Any],
    tunableop: bool,
    redo: bool,
    launch: Launch | None = None,
    tuning_launch: Launch | None = None,
) -> tuple[Report, Path]:
    """Run a sweep to its end or that of its budget; write `tuning.json` and `tuning.html` into ``out``.

    One sweep at a time works with a store: two would measure each other. A second one waits, and then finds what the
    first one measured.
    """
    with disk_errors(store.root):
        store.root.mkdir(parents=True, exist_ok=True)
    lock = Lock(store.root / LOCK)
    lock.acquire(on_wait=lambda who: reporter.warn(f"another sweep is measuring, this one waits for it: {who}"))
    try:
        budget.begin()
        if tunableop:
            _tuned_first(sweep, store, budget, reporter, out, tuning_launch, redo=redo)
        trials = Trials(store, sweep.subject, on_wait=reporter.say)
        # The collector of garbage spares what the newest runs name: these trials too.
        log = RunLog.start(store.root, f"tune {sweep.subject.name}", sweep.id, _entries(sweep, planned(sweep)))
        code = 5
        try:
            run_sweep(sweep, trials, budget, reporter, launch or local_launch(sweep.subject), redo=redo)
            found = report(
                sweep,
                budget,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                existing=existing,
                tunableop=os.fspath((out / FOLDER / FILE).absolute()) if tunableop else None,
            )
            with disk_errors(out):
                page = write(out, found)
            code = 0 if found["best"] is not None else 1
        finally:
            everything = dict.fromkeys([*planned(sweep), *sweep.outcomes])
            log.run = replace(log.run, plan=tuple(_entries(sweep, everything)))
            log.finish(None, code)
    finally:
        lock.release()
    return found, page


def _tuned_first(
    sweep: Sweep, store: Store, budget: Budget, reporter: Reporter, out: Path, launch: Launch | None, *, redo: bool
) -> None:
    """Give the sweep its tuned kernels; where the budget ends first, it goes without and says so."""
    patient = launch or local_launch(sweep.subject, stop_grace=STOP_GRACE_S)
    try:
        sweep.subject = sweep.subject.with_tuned(
            first_pass(sweep.subject, store, budget, reporter, patient, out, redo=redo)
        )
    except OutOfTimeError:
        reporter.warn("the budget ended during the TunableOp pass, which does not count")
        rest = tuple(axis for axis in sweep.design.axes if axis.knob != TUNABLEOP)
        sweep.design = replace(sweep.design, axes=rest)
        sweep.not_tried.append(((TUNABLEOP, "1"),))


def _entries(sweep: Sweep, trials: Iterable[Trial]) -> list[tuple[str, str]]:
    """Where trials are in the store; those that cannot be planned have no place."""
    found = []
    for trial in trials:
        with suppress(UserError):
            found.append((STAGE, sweep.subject.fingerprint(trial)))
    return found
