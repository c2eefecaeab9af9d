"""Calibrate a folder layer by layer, committing after each layer, and die in the middle of one where it is asked.

    python killed_layers.py FOLDER WORK TOKENS.pt OUT [STEPS]

After STEPS batches in all layers the process kills itself the hard way. Prints the layers that it did work on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from calibration import calibrate as room
from calibration.observers import Observation

FOLDER, WORK, TOKENS, OUT = map(Path, sys.argv[1:5])
STEPS = int(sys.argv[5]) if len(sys.argv) > 5 else None


class Watcher:
    steps = 0

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        yield self.advance

    def advance(self, count: int) -> None:
        sys.stdout.write(f"advance {count}\n")
        sys.stdout.flush()
        self.steps += 1
        if self.steps == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


if __name__ == "__main__":
    batches = list(torch.load(TOKENS, weights_only=True).split(4))
    # Each layer is worth a commit: they take no time here.
    room.COMMIT_SECONDS = 0.0
    outcome = room.calibrate(
        FOLDER, batches, Observation(), devices=["cpu"], work=WORK, watcher=Watcher(), mode="layer", activation_bytes=0
    )
    outcome.ranges.save(OUT)
