"""Calibrate a folder layer by layer in forks of this process, and kill each in the middle of one; run each again.

    python -m tests.calibration.killed_layers FOLDER TOKENS.pt PLACE STEPS...

For each number of STEPS: after so many batches in all layers a run kills itself the hard way, and another one goes on
from what it left. What each told and made is in the folder PLACE/STEPS. Prints a JSON list of the exit codes of both,
negative for a signal. A process of its own, because a process whose PyTorch has started threads must not fork; one for
all, because what a run imports takes longer than the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# What a run needs, imported once, before the forks.
from transformers import AutoModelForCausalLM, conversion_mapping, core_model_loading  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

from quantmint.calibration import layers
from quantmint.calibration.calibrate import Execution, calibrate
from quantmint.calibration.observers import Observation


class Watcher:
    """Writes down what a run advances by, and ends it after a number of such calls."""

    def __init__(self, told: Path, last: int | None) -> None:
        self._told, self._last, self._calls = told, last, 0

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        yield self.advance

    def advance(self, count: int) -> None:
        with self._told.open("a") as stream:
            stream.write(f"{count}\n")
        self._calls += 1
        if self._calls == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


def run(folder: Path, tokens: Path, place: Path, name: str, last: int | None) -> None:
    outcome = calibrate(
        folder,
        list(torch.load(tokens, weights_only=True).split(4)),
        Observation(),
        Execution(devices=["cpu"], work=place / "work", mode="layer", activation_bytes=0),
        watcher=Watcher(place / name, last),
    )
    outcome.ranges.save(place / f"{name}.safetensors")


def in_fork(folder: Path, tokens: Path, place: Path, name: str, last: int | None = None) -> int:
    """The exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(folder, tokens, place, name, last)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    model, blocks, root = map(Path, sys.argv[1:4])
    # Each layer is worth a commit: they take no time here.
    layers.COMMIT_SECONDS = 0.0
    codes = []
    for steps in sys.argv[4:]:
        (root / steps).mkdir()
        codes.append(
            [
                in_fork(model, blocks, root / steps, "killed", int(steps) + 1),  # the first call tells what was there
                in_fork(model, blocks, root / steps, "resumed"),
            ]
        )
    print(json.dumps(codes))  # noqa: T201
