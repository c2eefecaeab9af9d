"""Settings of the whole process while tensors are computed on a CPU: PyTorch's threads, and malloc's thresholds.

Users may overlap: a setting is made by the first of them, and restored when the last one has left.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from quantmint.calibration.lazy import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_DEFAULTS = {_M_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _M_TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}
"""The variables that set each option for a whole process (mallopt(3))."""
_GLIBC_THRESHOLD = 128 << 10
PIECES_BYTES = 32 << 20
"""Bytes at the end of the heap that stay in the process: several times a piece of the streaming engine, and the most
that glibc before 2.35 takes for the size from which on memory is mapped."""
LAYERS_BYTES = 128 << 20
"""The same while a model is run layer by layer, whose tensors are larger."""


class _Switch:
    """A setting of the process for overlapping users; ``set_up`` makes it, and returns what restores it."""

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0
        self._restore: Callable[[], None]

    @contextmanager
    def on(self, set_up: Callable[[], Callable[[], None]]) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._restore = set_up()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()


_MALLOC, _THREADS = _Switch(), _Switch()


@contextmanager
def keeping_freed_memory(count: int) -> Iterator[None]:
    """Within the block, have the C library keep the memory of freed tensors, ``count`` bytes of it at the heap's end.

    By default it returns such sizes to the system, and taking them again costs a page fault every 4 KiB: twice the time
    of MXFP4, and a sixth of GPTQ's processor time.
    """

    def set_up() -> Callable[[], None]:
        _set_thresholds({_M_MMAP_THRESHOLD: PIECES_BYTES, _M_TRIM_THRESHOLD: count})
        return lambda: _set_thresholds({option: _as_started(option) for option in _DEFAULTS}, trim=True)

    with _MALLOC.on(set_up):
        yield


@contextmanager
def many_small_workers() -> Iterator[None]:
    """Within the block, set PyTorch and malloc up for threads that each compute little at a time, over and over.

    PyTorch starts no threads of its own below the workers, and freed memory is kept.
    """

    def set_up() -> Callable[[], None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return lambda: torch.set_num_threads(threads)

    with keeping_freed_memory(PIECES_BYTES), _THREADS.on(set_up):
        yield


def _set_thresholds(thresholds: Mapping[int, int], *, trim: bool = False) -> None:
    """Set thresholds of glibc's malloc, in bytes by mallopt option; with ``trim``, return free memory to the system.

    Do nothing with another C library.
    """
    # By ctypes, because Python has no mallopt. Measured: mxfp4 of a model of 2 GB, on two cores, took 6.4 s with it and
    # 7.8 s without, with 86 thousand page faults instead of 1.5 million (medians of four runs each, in turns).
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        for option, size in thresholds.items():
            library.mallopt(option, size)
    if trim and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _as_started(option: int) -> int:
    """Return a malloc threshold as the process started with it, in bytes: its variable's or glibc's default."""
    value = os.environ.get(_DEFAULTS[option], "")
    return int(value) if value.isdigit() else _GLIBC_THRESHOLD
