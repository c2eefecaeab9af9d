"""The process that one measurement is made in: `python -m tests.bench.child ORDER RESULT`, both of them JSON files.

Times count from a clock that starts when the libraries are imported and a model of one layer was made once, so that
compilers and device contexts are ready. *Written* is when the last byte was given to the system, which a contender that
syncs says itself; for the others it is when they return. *Durable* is when every file is on the disk.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.contenders import CONTENDERS, Task


def measure(contender: str, task: Task, source: Path, destination: Path, warm: Path | None) -> dict[str, Any]:
    """Make a checkpoint once and say what it took: seconds, bytes."""
    started = time.perf_counter()
    work = CONTENDERS[contender](task)
    imported = time.perf_counter()
    if warm is not None:
        work(warm, destination.with_name(f"{destination.name}-warm"))
    cpu = _cpu_seconds()
    warmed = time.perf_counter()
    done = work(source, destination)
    returned = time.perf_counter()
    cpu = _cpu_seconds() - cpu
    for path in sorted(destination.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    durable = time.perf_counter()
    return {
        "import": imported - started,
        "warm_up": warmed - imported,
        "written": returned - warmed - done.tail,
        "returned": returned - warmed,
        "durable": durable - warmed,
        "cpu": cpu,
        "peak_rss": None if contender == "cp" else peak_memory(),
        "mapped": None if contender == "cp" else mapped_memory(),
        "peak_device": peak_device_memory(task.device),
        "phases": dict(done.phases),
        "threads": dict(done.threads),
    }


def peak_memory() -> int:
    """Largest resident size of this process, bytes; `ru_maxrss` would count its parent's before the exec as well."""
    return _status("VmHWM")


def mapped_memory() -> int:
    """Bytes of files that are mapped and resident now: the page cache's, which the system takes back when it must."""
    return _status("RssFile")


def _status(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def peak_device_memory(device: str) -> int | None:
    """Largest amount of a GPU's memory that PyTorch held, bytes; None on a CPU or where PyTorch was not used."""
    torch = sys.modules.get("torch")
    return None if torch is None or device == "cpu" else int(torch.cuda.max_memory_allocated(device))


def _cpu_seconds() -> float:
    """User and system time of this process, all of its threads and the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main(order: Path, result: Path) -> None:
    given = json.loads(order.read_text())
    warm = given["warm"] and Path(given["warm"])
    found = measure(given["contender"], Task(**given["task"]), Path(given["source"]), Path(given["destination"]), warm)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
