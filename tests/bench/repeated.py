"""Whether calibration sees the same numbers every time: ``python -m tests.bench.repeated --nodes 4 --cores 4``.

Every sample is measured again and again by the processes of a Ray cluster, which wrote a checkpoint before, as in a
run. Each summary is held against the first of its sample. Where one differs, what is told is where in the forward it
begins, by how much, and what both processes were: their threads, what the kernel lets them use of the processor, how
much they had done. Ends with 1 where anything differed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tests.bench.machine import describe
from tests.bench.model import SHAPES, write_model
from tests.bench.scaling import SCHEME, cluster, share_of_cores
from tests.bench.scaling_child import Silent, batches

_ARCH_PRCTL, _GET_PERMITTED = 158, 0x1022  # x86-64; arch/x86/include/uapi/asm/prctl.h: ARCH_GET_XCOMP_PERM
_SHOWN = 5
_measured = 0


def measure(folder: Path, samples: Sequence[tuple[int, Any]], threads: int) -> tuple[dict[str, Any], dict[int, Any]]:
    """What this process is, and of each sample every summary: [kind and name, largest value, SHA-256 of the bytes]."""
    global _measured
    began_with = {"omp": os.environ.get("OMP_NUM_THREADS"), "had_torch": "torch" in sys.modules, "before": _measured}
    import torch

    from calibration.measurement import Measurement
    from calibration.observers import Observation
    from calibration.ranges import run_resident
    from calibration.shares import _loaded

    began_with["threads"] = torch.get_num_threads()
    torch.set_num_threads(threads)
    one = _loaded(folder, "cpu", False)
    found = {}
    for number, batch in samples:
        seen = Measurement(Observation())
        run_resident(one, [batch], seen, lambda _: None)
        found[number] = [
            [f"{kind} {name}", float(seen.summaries[kind, name].total.float().max()), _bytes(seen, kind, name)]
            for kind, name in seen.order
        ]
        _measured += 1
    here = {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "permitted": _permitted()}
    return {**began_with, **here, "capability": torch.backends.cpu.get_cpu_capability()}, found


def _bytes(seen: Any, kind: Any, name: str) -> str:
    import hashlib

    import torch

    flat = seen.summaries[kind, name].total.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _permitted() -> str:
    """The processor's large states (AMX tiles) that the kernel lets this process use, as a mask."""
    mask = ctypes.c_uint64(0)
    failed = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _GET_PERMITTED, ctypes.byref(mask))
    return "unknown" if failed else hex(mask.value)


class Seen:
    """The first of each sample, and what differed from it."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[dict[str, Any], Any]] = {}
        self.taken = 0
        self.different: list[dict[str, Any]] = []

    def add(self, process: dict[str, Any], found: dict[int, Any]) -> list[dict[str, Any]]:
        """Hold these against the first; what differs, with the first summaries of the forward that do."""
        new = []
        for number, rows in found.items():
            self.taken += 1
            first_process, first = self._first.setdefault(number, (process, rows))
            unlike = [[name, was, now] for (name, was, x), (_, now, y) in zip(first, rows, strict=True) if x != y]
            if unlike:
                new.append(
                    {
                        "sample": number,
                        "summaries": len(unlike),
                        "of": len(rows),
                        "begins": unlike[:_SHOWN],
                        "process": process,
                        "first": first_process,
                    }
                )
        self.different += new
        return new


def _write(folder: Path, out: Path, address: str) -> Any:
    """A checkpoint by the cluster, which its processes are then like those of a run; gives the cluster."""
    from pipeline.clusters.ray.spread import RaySpread
    from pipeline.quantize.engines.stream.engine import write_checkpoint
    from pipeline.quantize.engines.stream.plan import plan_shards
    from pipeline.quantize.formats.checkpoint import open_checkpoint
    from pipeline.quantize.formats.layout import Choice
    from pipeline.quantize.model.structure import read_structure

    source = open_checkpoint(folder)
    structure = read_structure(source.folder, source.tensors)
    choice = Choice(dict.fromkeys(structure.linear, SCHEME), structure.kept, False)
    spread = RaySpread(address, "cpu", Silent())
    spread.require_same([folder], [out])
    write_checkpoint(
        source,
        plan_shards(source, structure, choice, "compressed-tensors"),
        choice,
        {},
        out / "checkpoint",
        checkpoint_format="compressed-tensors",
        manifest=out / "manifest.jsonl",
        write=spread.write_shards,
    )
    return spread


@click.command()
@click.option("--size", default=4.0, show_default=True, help="The model's size in GB.")
@click.option("--shards", default=32, show_default=True, help="Files that it comes in.")
@click.option("--nodes", default=4, show_default=True, help="Nodes of the cluster.")
@click.option("--cores", default=4, show_default=True, help="Cores of each, and threads of each process.")
@click.option("--samples", default=32, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--passes", default=3, show_default=True, help="How often each is measured in a cluster.")
@click.option("--minutes", default=5.0, show_default=True, help="A fresh cluster is begun until then.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; twice the size must be free.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write what differed there, as it is seen.")
def main(
    size: float,
    shards: int,
    nodes: int,
    cores: int,
    samples: int,
    length: int,
    passes: int,
    minutes: float,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Measure samples again and again, and say which numbers are not the first ones."""
    import ray

    from calibration.shares import split
    from pipeline.clusters.ray.nodes import ask_for

    began, seen, machine = time.monotonic(), Seen(), describe("cpu")
    work = Path(tempfile.mkdtemp(prefix="quantmint-bench-", dir=folder))
    try:
        write_model(work / "model", SHAPES["2gb"], SHAPES["2gb"].layers_for(size), shards)
        every = batches({"samples": samples, "length": length})
        while not seen.taken or time.monotonic() - began < minutes * 60:
            out = Path(tempfile.mkdtemp(prefix="out-", dir=work))
            with cluster(share_of_cores(nodes, cores)) as address:
                spread = _write(work / "model", out, address)
                ask = ask_for(spread.nodes, "cpu")
                task = ray.remote(scheduling_strategy="SPREAD", **ask.options())(measure)
                for number in range(passes):
                    shares = split(samples, nodes, "resident")
                    running = [
                        task.remote(work / "model", [(each, every[each]) for each in mine], cores) for mine in shares
                    ]
                    new = [one for done in running for one in seen.add(*ray.get(done))]
                    click.echo(f"{time.monotonic() - began:.0f} s, pass {number}: {len(new)} of {samples} differ")
                    for one in new:
                        click.echo(json.dumps(one))
                    if json_path is not None:
                        found = {"machine": machine, "taken": seen.taken, "different": seen.different}
                        json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                spread.release()
            shutil.rmtree(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    click.echo(f"{len(seen.different)} of {seen.taken} measurements differ from the first of their sample")
    sys.exit(1 if seen.different else 0)


if __name__ == "__main__":
    main()
