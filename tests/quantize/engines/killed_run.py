"""Run the engine in forks of this process and kill each of them with signal 9, where or when a job says.

Reads a JSON list of jobs from the first argument and prints a JSON list of results. A job has source, work (a folder)
and either ``at`` (bytes read, of a kill from inside) or ``after`` (seconds, of a kill from outside). A process of its
own, because a process whose PyTorch has started threads must not fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (imported once, before the forks)

from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.structure import Structure


def engine(source: Path, work: Path, advance: Callable[[int], None]) -> None:
    checkpoint = open_checkpoint(source)
    modules = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")]
    weights = {module: WeightSource(f"{module}.weight") for module in modules}
    structure = Structure(dict.fromkeys(modules, (0, 0)), (), (), 0, weights)
    choice = Choice(dict.fromkeys(modules, "ptpc_fp8"), ("lm_head",), False)
    plans = plan_shards(checkpoint, structure, choice, "compressed-tensors")
    write_checkpoint(
        CheckpointPlan(checkpoint, plans, choice, {}, checkpoint_format="compressed-tensors"),
        work / "checkpoint",
        manifest=work / "manifest.jsonl",
        advance=advance,
    )


def in_fork(source: Path, work: Path, *, at: int | None = None, after: float | None = None) -> int:
    """The exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                if at is not None and done >= at:
                    os.kill(os.getpid(), signal.SIGKILL)

            engine(source, work, advance)
            code = 0
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def marks(work: Path) -> dict[str, list[int]]:
    """Inode and time of each committed weight file."""
    lines = (work / "manifest.jsonl").read_text().splitlines() if (work / "manifest.jsonl").exists() else []
    names = [json.loads(line)["name"] for line in lines if line]
    status = {name: (work / "checkpoint" / name).stat() for name in names}
    return {name: [entry.st_ino, entry.st_mtime_ns] for name, entry in status.items()}


def run(job: dict[str, Any]) -> dict[str, Any]:
    source, work = Path(job["source"]), Path(job["work"])
    work.mkdir(parents=True)
    killed = [in_fork(source, work, at=job["at"])] if "at" in job else []
    killed += [in_fork(source, work, after=seconds) for seconds in job.get("after", ())]
    # A file that was renamed into place but not yet noted counts as not committed.
    before = marks(work)
    partial = [path.name for path in (work / "checkpoint").glob("*.partial")]
    code = in_fork(source, work)
    return {"killed": killed, "partial": partial, "before": before, "code": code, "after": marks(work)}


if __name__ == "__main__":
    print(json.dumps([run(job) for job in json.loads(Path(sys.argv[1]).read_text())]))  # noqa: T201
