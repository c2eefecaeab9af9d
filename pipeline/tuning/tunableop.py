"""TunableOp: PyTorch's search among the matrix kernels of rocBLAS and hipBLASLt, once, ahead of the sweep.

The first pass serves the base plan with tuning on, asks it the workload, and stops it with time to write its files: one
a device, for ``%d`` in the name is replaced by the device's number. Whatever serves afterwards reads those files and
tunes nothing. Graphs stay as the plan has them: with them the decode batches that are tuned are those that are served.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pipeline.canonical import fingerprint
from pipeline.errors import StageError, UserError
from pipeline.serving.plan import LaunchPlan
from pipeline.store.disk import sha256_of
from pipeline.tuning.space import TUNABLEOP

FILE = "tunableop_results%d.csv"
STOP_GRACE_S = 120.0
_MUST_SAY = ("PT_VERSION", "ROCM_VERSION", "GCN_ARCH_NAME")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The files of a pass. ``shapes`` counts tuned operator shapes by device, ``operators`` those of each kind.

    ``validators`` are the versions that the files hold for: PyTorch ignores a file that was made with others.
    """

    folder: Path
    digest: str
    shapes: Mapping[int, int]
    operators: Mapping[str, int]
    validators: Mapping[str, str]


def refuse_unless_rocm(kind: str) -> None:
    """UserError where TunableOp has nothing to choose from."""
    if kind != "rocm":
        device = {"cpu": "a CPU", "cuda": "an NVIDIA GPU"}.get(kind, kind)
        raise UserError(
            f"--tunableop: TunableOp chooses among the kernels of rocBLAS and hipBLASLt; on {device} PyTorch registers "
            "only the default one, so there is nothing to tune",
            hint="leave --tunableop out, or tune on an Instinct machine",
        )


def tuning(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """The plan of the first pass: it searches, and writes what it finds into ``folder``."""
    return _with(plan, "1", folder / FILE)


def serving_with(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """A plan that uses what was found and searches no more."""
    return _with(plan, "0", folder / FILE)


def _with(plan: LaunchPlan, search: str, filename: Path) -> LaunchPlan:
    variables = {
        TUNABLEOP: "1",
        "PYTORCH_TUNABLEOP_TUNING": search,
        "PYTORCH_TUNABLEOP_FILENAME": str(filename),
    }
    return replace(plan, env=MappingProxyType({**plan.env, **variables}))


def read_tuned(folder: Path, devices: int) -> Tuned:
    """Check the files of a pass over ``devices`` devices.

    Raises StageError for a device without a file, a file without shapes or versions, and versions that differ.
    """
    shapes: dict[int, int] = {}
    operators: Counter[str] = Counter()
    validators: dict[str, str] = {}
    digests = {}
    for device in range(devices):
        path = folder / (FILE % device)
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
