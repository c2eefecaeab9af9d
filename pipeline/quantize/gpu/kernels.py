"""Compile the kernels beside this module for a GPU when they are first needed, and run them.

CUDA and HIP read the same source. PyTorch's compiler at run time needs no other compiler on the machine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quantmint.calibration.lazy import torch

Launch = Callable[[int, int, Sequence[Any]], None]
"""Runs a kernel: ``launch(threads, weights, arguments)``, the arguments being tensors or integers."""
_THREADS = 64  # of a block: few, so that the rows of a small weight reach all processors of a GPU
_COMPILING = threading.Lock()


def gpu_kernel(name: str, device: torch.device, **defined: str | float) -> Launch | None:
    """Return the kernel ``name`` for a GPU with its names ``defined``; None for a CPU, and where it cannot be compiled.

    A warning says once that it cannot. PyTorch's own operations do the same work in more time; where they sum in
    another order, last bits differ.
    """
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    with _COMPILING:
        return _compiled(name, number, tuple(defined.items()))


@cache
def _compiled(name: str, device: int, defined: tuple[tuple[str, str | float], ...]) -> Launch | None:
    lines = [f"#define {key} {value}" for key, value in defined]
    source = "\n".join([*lines, Path(__file__).with_name(f"{name}.cu").read_text(encoding="utf-8")])
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, name)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # no compiler, or a PyTorch before 2.9
        why = str(error).strip().splitlines()
        logging.getLogger(__name__).warning(
            "The GPU kernel %s cannot be compiled (%s); PyTorch's operations do its work in more time.",
            name,
            why[0] if why else type(error).__name__,
        )
        return None

    def launch(threads: int, weights: int, arguments: Sequence[Any]) -> None:
        if not threads:
            return
        with torch.cuda.device(device):
            kernel(grid=(-(-threads // _THREADS), weights, 1), block=(_THREADS, 1, 1), args=list(arguments))

    return launch
