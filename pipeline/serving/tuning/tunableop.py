"""Run PyTorch's TunableOp once over a workload, and read the matrix kernels that it found."""

from __future__ import annotations

import csv
import shutil
from functools import partial
from pathlib import Path

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import ServingError, StageError
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.serving.tuning.space import BASE
from quantmint.pipeline.serving.tuning.subject import TUNED_FILE, TunedKernels, TuningSubject, with_tunableop
from quantmint.pipeline.serving.tuning.trials import Budget, TrialLimits, TrialResult, measure_stored
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.tree import Store

FOLDER = "tunableop"
STOP_GRACE_S = 120.0  # TunableOp writes its files when the server stops


def read_kernels(folder: Path, devices: int) -> TunedKernels:
    """Return the kernels that TunableOp wrote to a folder, one file for each of the ``devices``.

    Raises `StageError` when a file is missing or has no tuned shape.
    """
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


def search_kernels(
    subject: TuningSubject, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool
) -> TunedKernels:
    """Serve the workload once with TunableOp's search on, and copy the kernels to ``out``/tunableop.

    A pass in the store is used again, except with ``redo``. Raises `ServingError` when the server fails, `StageError`
    for files that PyTorch could not use, `OutOfTimeError` when the budget ends.
    """
    base = subject.plan(BASE)
    devices = base.layout.tensor * base.layout.pipeline
    payload = subject.plan_payload(with_tunableop(base, Path(), search=True)) | {"stage": FOLDER}
    entry = store.find(FOLDER, fingerprint(payload))
    if entry is None:
        reporter.say("TunableOp searches for the fastest matrix kernels of this workload")
    elif redo:
        store.retire(entry)
    else:
        budget.earlier += float(str(entry.record.result["seconds"]))

    def check(result: TrialResult, folder: Path) -> None:
        if result.status == "failed":
            raise ServingError(f"the TunableOp pass failed: {result.why}", hint=result.fix)
        read_kernels(folder, devices)

    search = partial(with_tunableop, base, search=True)
    limits = TrialLimits(FOLDER, budget, stop_grace=STOP_GRACE_S)
    _, stored = measure_stored(subject, store, payload, search, check, limits, reporter)
    destination = out / FOLDER
    destination.mkdir(parents=True, exist_ok=True)
    for old in destination.glob("*.csv"):
        old.unlink()
    for file in sorted(stored.glob("*.csv")):
        shutil.copyfile(file, destination / file.name)
    kernels = read_kernels(destination.resolve(), devices)
    reporter.say(f"TunableOp: {sum(kernels.shapes.values())} shapes on {devices} devices")
    return kernels
