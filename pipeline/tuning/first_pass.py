"""The TunableOp pass of a sweep: run once, kept in the store, copied beside the result for the checkpoint."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

from pipeline.canonical import fingerprint
from pipeline.errors import ServingError
from pipeline.progress import Reporter
from pipeline.store.tree import Store
from pipeline.tuning.budget import Budget
from pipeline.tuning.measure import STARTUP_TIMEOUT_S, Deadline, Launch, measure
from pipeline.tuning.space import BASE
from pipeline.tuning.subject import Subject
from pipeline.tuning.trials import log_path
from pipeline.tuning.tunableop import Tuned, read_tuned, tuning

FOLDER = "tunableop"


def first_pass(
    subject: Subject, store: Store, budget: Budget, reporter: Reporter, launch: Launch, out: Path, *, redo: bool
) -> Tuned:
    """Tune the matrix products that the workload meets; the files end up in ``out``/tunableop.

    Raises ServingError where the server does not come through, StageError where its files are not usable, and
    `OutOfTimeError` where the budget ends in the middle: half a search is thrown away.
    """
    layout = subject.plan(BASE).layout
    devices = layout.tensor * layout.pipeline
    payload = subject.payload_of(tuning(subject.plan(BASE), Path())) | {"stage": FOLDER}
    with store.working(FOLDER, fingerprint(payload)) as work:
        if redo and work.existing is not None:
            store.retire(work.existing)
    with store.working(FOLDER, fingerprint(payload)) as work:
        if work.existing is None:
            work.discard()
            reporter.say("TunableOp searches for the fastest matrix kernels of this workload")
            started = datetime.now(UTC)
            outcome = measure(
                subject,
                tuning(subject.plan(BASE), work.path),
                work.path,
                log=log_path(store, subject),
                launch=launch,
                sweep="tunableop",
                deadline=Deadline(budget.left),
                startup_timeout=STARTUP_TIMEOUT_S,
                progress=reporter,
            )
            if outcome.status == "failed":
                raise ServingError(f"the TunableOp pass failed: {outcome.why}", hint=outcome.fix)
            read_tuned(work.path, devices)
            work.commit(
                payload=payload,
                result={"seconds": outcome.seconds},
                started=started,
                tools={"vllm": subject.vllm.version},
            )
        else:
            budget.earlier(float(str(work.existing.record.result["seconds"])))
        assert work.existing is not None  # noqa: S101 - found or committed
        made = work.existing.path
    kept = out / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("*.csv"):
        old.unlink()
    for file in sorted(made.glob("*.csv")):
        shutil.copyfile(file, kept / file.name)
    tuned = read_tuned(kept.resolve(), devices)
    reporter.say(f"TunableOp: {sum(tuned.shapes.values())} shapes on {devices} devices")
    return tuned
