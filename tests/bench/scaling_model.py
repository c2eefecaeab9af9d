"""A model of more nodes than there are here, made of parts that were measured one by one.

Quantizing is Amdahl's law with names: what one process does by itself (planning, the cluster's start and check, the
last commit), and files, which are given out whole, so that the slowest node has ceil(files / nodes) of them. A commit
is one process' work too, but beside the nodes': it counts where it would be the longer of the two. Calibrating: each
node loads the model once, measures its shares of the samples, and one process joins what was seen.

Assumed, and not measured: each node has cores like those of one node here and a network to the shared files that is no
slower than this machine's page cache and disk for a node by itself; that holds for parallel filesystems and not for one
file server, for which there is a row with all writes through one disk like this machine's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

_PROBE = 512 << 20  # bytes
NODES = (1, 2, 4, 8)
LARGER = 10
"""Times the files of the model that was measured, each of its size: where starting counts for little."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds, of this model on one node of ``cores`` cores, and rates.

    ``start``: connecting, first processes with PyTorch, the check. ``task``: what Ray takes for one. ``file``: a task
    that makes one file, by itself on its node. ``commit``: the driver's part of it. ``load``: the model in memory, as
    the first batch finds it. ``sample``: one more sequence. ``join``: the measurement of one share.
    """

    gigabytes: float
    files: int
    samples: int
    cores: int
    start: float
    plan: float
    task: float
    file: float
    commit: float
    load: float
    sample: float
    join: float
    written_gigabytes: float
    disk: float

    @classmethod
    def of(cls, result: Mapping[str, Any], source: Path) -> Parts:
        """Take the parts from the smallest cluster's run, and measure what no run shows."""
        count = min(result["cores_a_node"], key=int)
        run, files = result["runs"][f"{count} nodes"], result["shards"]
        load, sample, join = _calibration(result, source) if result["samples"] else (0.0, 0.0, 0.0)
        return cls(
            result["model_gb"],
            files,
            result["samples"],
            result["cores_a_node"][count],
            run["start"],
            run["plan"],
            run["task"],
            run["seconds"]["task"] / files,
            run["seconds"]["flush"] / files,
            load,
            sample,
            join,
            # PTPC-FP8 halves what is quantized; the embeddings of a real model are a small part.
            result["model_gb"] / 2,
            _disk(source.parent),
        )


def modelled(parts: Parts) -> dict[str, Any]:
    """Seconds by the number of nodes: of the model that was measured, and of a larger one at the same rates."""
    sizes = {
        "measured here": (parts.gigabytes, parts.files, parts.samples),
        f"{LARGER} x its files": (LARGER * parts.gigabytes, LARGER * parts.files, parts.samples),
    }
    rows = [_row(parts, name, *size, nodes) for name, size in sizes.items() for nodes in NODES]
    first = {row["model"]: row for row in rows if row["nodes"] == 1}
    for row in rows:
        row["quantize_speedup"] = first[row["model"]]["quantize"] / row["quantize"]
        row["calibrate_speedup"] = first[row["model"]]["calibrate"] / row["calibrate"] if row["calibrate"] else None
    return {"rows": rows, "assumed": __doc__.split("Assumed, and not measured: ")[1].replace("\n", " ").strip()}


def _row(parts: Parts, model: str, gigabytes: float, files: int, samples: int, nodes: int) -> dict[str, Any]:
    larger = (gigabytes / files) / (parts.gigabytes / parts.files)
    serial = parts.start + parts.plan + parts.commit * larger
    made = ceil(files / nodes) * (parts.file * larger + parts.task)
    committed = files * parts.commit * larger
    one_disk = parts.written_gigabytes * gigabytes / parts.gigabytes / parts.disk
    shares = min(samples, 4 * nodes)
    seen = ceil(shares / nodes) * ceil(samples / max(shares, 1))
    scale = gigabytes / parts.gigabytes
    calibrated = parts.start + parts.load * scale + seen * parts.sample * scale + shares * (parts.join + parts.task)
    return {
        "model": model,
        "gigabytes": gigabytes,
        "files": files,
        "nodes": nodes,
        "cores": parts.cores,
        "quantize": serial + max(made, committed),
        "quantize_serial": serial,
        "quantize_one_disk": serial + max(made, committed, one_disk),
        "calibrate": calibrated if samples else 0.0,
    }


def _calibration(result: Mapping[str, Any], source: Path) -> tuple[float, float, float]:
    """Seconds until the model is there, of one more sample, and of reading and joining a share's measurement."""
    from quantmint.calibration.measurement import Measurement
    from quantmint.calibration.observers import Observation
    from quantmint.calibration.ranges import run_resident
    from quantmint.calibration.replica import load_resident
    from tests.bench.scaling_child import batches

    observation, taken = Observation(), []
    given = batches({"samples": min(result["samples"], 5), "length": result["length"]})
    began = time.perf_counter()
    one = load_resident(source, "cpu")
    loaded = time.perf_counter() - began
    whole = Measurement(observation)
    for batch in given:
        began = time.perf_counter()
        seen = run_resident(one, [batch], observation)
        taken.append(time.perf_counter() - began)
    sample = min(taken)
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        seen.save(Path(folder) / "seen.pt")
        began = time.perf_counter()
        whole.add(Measurement.load(observation, Path(folder) / "seen.pt"))
        whole.finish()
        join = time.perf_counter() - began
    return loaded + taken[0] - sample, sample, join


def _disk(folder: Path) -> float:
    """GB/s that a file is written with until it is on the disk for good."""
    block = os.urandom(1 << 22)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(_PROBE // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE / (time.perf_counter() - began) / 1e9
