"""PyTorch, imported when it is first used: what only plans, checks or prints starts without those seconds.

from quantmint.calibration.lazy import torch
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Run the block, whose imports stay for good, without garbage collection, which takes a tenth to a sixth of them.

    Afterwards the collector does not look through what exists by then, the imported modules above all.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()


if TYPE_CHECKING:
    import torch as torch
else:

    @cache
    def _imported() -> Any:
        with nullcontext() if "torch" in sys.modules else uncollected():
            import torch
        return torch

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(_imported(), name)

    torch = _Torch()
