"""Run ``quantmint quantize`` in forks of this process and kill each with signal 9 at one of its renames.

Reads a JSON object from the first argument: ``arguments`` of the command with the folder last, and ``folders``, each
with the number of the rename before which its run is killed (null: not at all). Each is then run again to its end.
Prints a list with the files that were there after the kill. A process of its own, because a process whose PyTorch has
started threads must not fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

# What a run needs, imported once, before the forks.
import torch  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import quantmint.pipeline.runs.oneshot  # noqa: F401
from quantmint.pipeline.commands.cli import main


def in_fork(arguments: list[str], *, kill_at: int | None) -> int:
    """The exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        done = 0

        def hook(event: str, _: object) -> None:
            nonlocal done
            if event == "os.rename":
                done += 1
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        code = 1
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            if kill_at is None:
                Path(arguments[-1]).with_suffix(".renames").write_text(str(done))
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def files(folder: Path) -> dict[str, list[int]]:
    """Inode and time of each file below a folder."""
    found = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: [status.st_ino, status.st_mtime_ns] for name, status in found.items()}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    ended = []
    for folder, number in job["folders"].items():
        command = [*job["arguments"], folder]
        killed = None if number is None else in_fork(command, kill_at=number)
        left = files(Path(folder))
        ended.append({"killed": killed, "left": left, "code": in_fork(command, kill_at=None)})
    sys.stdout = sys.__stdout__
    Path(sys.argv[2]).write_text(json.dumps(ended))
