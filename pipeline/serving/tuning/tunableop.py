"""TunableOp: PyTorch's search among the matrix kernels of rocBLAS and hipBLASLt, once, ahead of the sweep.

The first pass serves the base plan with tuning on, asks it the workload, and stops it with time to write its files: one
a device, for ``%d`` in the name is replaced by the device's number. Whatever serves afterwards reads those files and
tunes nothing. Graphs stay as the plan has them: with them the decode batches that are tuned are those that are served.
"""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from pipeline.base.canonical import fingerprint
from pipeline.base.errors import ServingError, StageError, UserError
from pipeline.base.progress import Reporter
from pipeline.serving.tuning.space import BASE
from pipeline.serving.tuning.subject import TUNED_FILE, Subject, Tuned, tuning
from pipeline.serving.tuning.trials import Budget, log_path, measure
from pipeline.store.disk import sha256_of
from pipeline.store.tree import Store

FOLDER = "tunableop"
STOP_GRACE_S = 120.0
_MUST_SAY = ("PT_VERSION", "ROCM_VERSION", "GCN_ARCH_NAME")


def refuse_unless_rocm(kind: str) -> None:
    """UserError where TunableOp has nothing to choose from."""
    if kind != "rocm":
        device = {"cpu": "a CPU", "cuda": "an NVIDIA GPU"}.get(kind, kind)
        raise UserError(
            f"--tunableop: TunableOp chooses among the kernels of rocBLAS and hipBLASLt; on {device} PyTorch registers "
            "only the default one, so there is nothing to tune",
            hint="leave --tunableop out, or tune on an Instinct machine",
        )


def read_tuned(folder: Path, devices: int) -> Tuned:
    """Check the files of a pass over ``devices`` devices.

    Raises StageError for a device without a file, a file without shapes or versions, and versions that differ.
    """
    shapes: dict[int, int] = {}
    operators: Counter[str] = Counter()
    validators: dict[str, str] = {}
    digests = {}
    for device in range(devices):
        path = folder / (TUNED_FILE % device)
        if not path.is_file():
            raise StageError(
                f"TunableOp wrote no {path.name} for device {device}: the server may have been killed before it could,"
                " or met no matrix product that TunableOp handles",
                hint=f"look at the log beside {folder}",
            )
        found, rows = _read(path)
        missing = [name for name in _MUST_SAY if name not in found]
        if missing or not rows:
            lack = f"no Validator line for {', '.join(missing)}" if missing else "no tuned shape"
            raise StageError(f"{path} has {lack}: PyTorch would not use it")
        differing = [name for name in found if validators.get(name, found[name]) != found[name]]
        if differing:
            raise StageError(f"{path} was made with another {differing[0]} than the file of device 0")
        validators |= found
        shapes[device] = len(rows)
        operators.update(operator for operator, _ in rows)
        digests[path.name] = sha256_of(path)
    return Tuned(
        folder,
        fingerprint(digests),
        MappingProxyType(shapes),
        MappingProxyType(dict(operators)),
        MappingProxyType(validators),
    )


def _read(path: Path) -> tuple[dict[str, str], set[tuple[str, str]]]:
    validators: dict[str, str] = {}
    shapes: set[tuple[str, str]] = set()
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) >= 3 and row[0] == "Validator":
                validators[row[1]] = ",".join(row[2:])
            elif len(row) >= 3 and "TunableOp" in row[0]:
                shapes.add((row[0], row[1]))
            elif row:
                raise StageError(f"{path}:{number}: found {','.join(row)!r}, expected a Validator or a tuned operator")
    return validators, shapes


def first_pass(subject: Subject, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool) -> Tuned:
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
                sweep="tunableop",
                budget=budget,
                progress=reporter,
                stop_grace=STOP_GRACE_S,
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
        made = store.entry_path(FOLDER, work.fingerprint)
    kept = out / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("*.csv"):
        old.unlink()
    for file in sorted(made.glob("*.csv")):
        shutil.copyfile(file, kept / file.name)
    tuned = read_tuned(kept.resolve(), devices)
    reporter.say(f"TunableOp: {sum(tuned.shapes.values())} shapes on {devices} devices")
    return tuned
