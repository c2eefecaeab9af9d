"""The processes of a measurement: ``python -m tests.bench.scaling_child drive ORDER``, or ``hold CORES`` (JSON).

A driver prints one JSON object: seconds of each part. What comes before the first byte (imports, planning, the
cluster's check) is timed apart; a driver of a cluster has asked its nodes by then, so that their processes have
PyTorch. A holder keeps a Ray cluster until its standard input ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NO_OPS = 50


def hold(cores: list[list[int]]) -> None:
    """Each node gets the cores of one list, and its workers inherit them. Prints ``address HOST:PORT`` when all are."""
    from ray.cluster_utils import Cluster

    from tests.clusters.ray.lean import lean_nodes

    ours = os.sched_getaffinity(0)
    cluster = Cluster()
    for mine in cores:
        os.sched_setaffinity(0, mine)
        head = {} if cluster.head_node else {"include_dashboard": False}
        with lean_nodes():
            cluster.add_node(num_cpus=len(mine), object_store_memory=100 << 20, **head)
    os.sched_setaffinity(0, ours)
    try:
        print(f"address {cluster.address}", flush=True)  # noqa: T201 - what it is read for
        sys.stdin.read()
    finally:
        cluster.shutdown()


def drive(order: dict[str, Any]) -> dict[str, Any]:
    from quantmint.pipeline.base.progress import PlainReporter
    from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, write_checkpoint
    from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.formats.choice import Choice
    from quantmint.pipeline.quantize.model.reader import read_structure

    found: dict[str, Any] = {}
    watcher = PlainReporter(sys.stderr)

    @contextmanager
    def clock(name: str) -> Any:
        began = time.perf_counter()
        yield
        found[name] = time.perf_counter() - began

    out = Path(order["out"])
    out.mkdir()
    with clock("plan"):
        checkpoint = open_checkpoint(Path(order["source"]))
        structure = read_structure(checkpoint.folder, checkpoint.tensors)
        choice = Choice(dict.fromkeys(structure.linear, order["scheme"]), structure.kept, False)
        plans = plan_shards(checkpoint, structure, choice, "compressed-tensors")
    spread, write = None, None
    if order["on"] is not None:
        from quantmint.pipeline.clusters.ray.spread import RaySpread

        with clock("start"):
            spread = RaySpread(order["on"], "cpu", watcher)
            spread.require_same([checkpoint.folder], [out])
        write = spread.write_shards
        found["task"] = _task_seconds()
    digest = hashlib.sha256()
    with clock("quantize"):
        written = write_checkpoint(
            CheckpointPlan(checkpoint, plans, choice, {}, checkpoint_format="compressed-tensors"),
            out / "checkpoint",
            manifest=out / "manifest.jsonl",
            write=write,
        )
    found["seconds"] = dict(written.seconds)
    for shard in written.shards:
        digest.update(shard.sha256.encode())
    found["sha256"], digest = digest.hexdigest(), hashlib.sha256()
    if order["samples"]:
        with clock("calibrate"):
            ranges = _calibrate(checkpoint.folder, order, out, spread, watcher)
        tables = {"input": ranges.inputs, "key": ranges.keys, "value": ranges.values}
        found["values"] = {
            f"{kind} {name}": amax.tolist() for kind, own in tables.items() for name, amax in own.items()
        }
        digest.update(json.dumps(found["values"], sort_keys=True).encode())
    if spread is not None:
        spread.release()
    return {**found, "threads": len(os.sched_getaffinity(0)), "ranges": digest.hexdigest()}


def _calibrate(folder: Path, order: dict[str, Any], out: Path, spread: Any, watcher: Any) -> Any:
    import torch

    from quantmint.calibration.calibrate import Execution, calibrate
    from quantmint.calibration.observers import Observation

    # As many threads as a worker takes, which need not be what the driver was told.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    places = None if spread is None else spread.places(folder)
    return calibrate(
        folder,
        batches(order),
        Observation(),
        Execution(devices=["cpu"], work=out / "shares", mode="resident", elsewhere=places),
        watcher=watcher,
    ).ranges


def batches(order: dict[str, Any]) -> list[Any]:
    """One sequence a batch, so that there is something to share out: int64 [1, length] each."""
    import torch

    shape = (order["samples"], order["length"])
    return list(torch.randint(4, 1000, shape, generator=torch.Generator().manual_seed(0)).split(1))


def _task_seconds() -> float:
    """Seconds that Ray takes for a task that does nothing, one after the other."""
    import ray

    nothing = ray.remote(num_cpus=0)(lambda: None)
    ray.get(nothing.remote())
    began = time.perf_counter()
    for _ in range(_NO_OPS):
        ray.get(nothing.remote())
    return (time.perf_counter() - began) / _NO_OPS


if __name__ == "__main__":
    role, given = sys.argv[1], json.loads(sys.argv[2])
    if role == "hold":
        hold(given)
    else:
        print(json.dumps(drive(given)))  # noqa: T201 - what it is read for
