"""A few seconds of what the stages do, timed on this machine.

Each part runs on all cores, for what counts is what they get done together: a memory bus that one thread fills does
not give two threads twice as much. The middle of three passes is taken.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.cost.rates import Rates
from pipeline.cost.volume import CARRIED
from pipeline.engines.stream.engine import CPU_PIECE
from pipeline.engines.stream.error import sampled_error
from pipeline.engines.stream.kernels import KERNELS, amax
from pipeline.store.disk import fsync

_BYTES = 64 << 20
_WEIGHT = 32 << 20  # bytes of 16-bit weight that a kernel is timed on
_COLUMNS = 4096
_PASSES = 3


def probe(device: str, store: Path, machine: str) -> Rates:
    """Measure this machine; ``store`` is a folder on the filesystem that checkpoints are written to."""
    import torch

    torch.zeros(1, device=device)  # a device's context takes memory of the host
    resident = _resident()
    workers = len(os.sched_getaffinity(0))
    store.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="probe-", dir=store) as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        files = _Files(Path(folder), pool, workers)
        written, synced = files.write()
        read = _middle(lambda: files.read(cold=False))
        disk = files.read(cold=True)
        hashed = _middle(files.hash)
        with _single_threads(torch):
            kernels = {name: _kernel(name, device, pool) for name in (*KERNELS, CARRIED)}
    return Rates(
        machine=machine,
        device_kind=torch.device(device).type,
        read=_BYTES / read,
        disk=_BYTES / disk,
        write=_BYTES / written,
        sync=_BYTES / synced,
        hash=_BYTES / hashed,
        kernels=kernels,
        link=None if device == "cpu" else _link(device),
        flops=_flops(device),
        scores=_scores(device),
        resident=resident,
    )


class _Files:
    """A file a worker, all of them together of `_BYTES`."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, workers: int) -> None:
        self._paths = [folder / str(number) for number in range(workers)]
        self._pool = pool
        self._data = [os.urandom(_BYTES // workers)] * workers

    def write(self) -> tuple[float, float]:
        """Seconds to hand all bytes to the system, and then to the disk.

        The first pass may be spent on memory that a virtual machine gets from its host only now.
        """
        written, synced = [], []
        for _ in range(_PASSES):
            for path in self._paths:
                path.unlink(missing_ok=True)
            written.append(_timed(lambda: list(self._pool.map(Path.write_bytes, self._paths, self._data))))
            synced.append(_timed(lambda: list(map(fsync, self._paths))))
        return statistics.median(written), statistics.median(synced)

    def read(self, *, cold: bool) -> float:
        """Seconds to read all bytes, from the page cache or from the disk."""

        def one(path: Path) -> None:
            buffer = bytearray(CPU_PIECE)
            with path.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

        if cold:
            for path in self._paths:
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        return _timed(lambda: list(self._pool.map(one, self._paths)))

    def hash(self) -> float:
        """Seconds of one thread to hash all bytes, while all threads do so."""
        workers = len(self._paths)
        return workers * _timed(lambda: list(self._pool.map(lambda data: hashlib.sha256(data).digest(), self._data)))


def _kernel(name: str, device: str, pool: ThreadPoolExecutor) -> float:
    """Bytes of bfloat16 weight a second: by pieces on a CPU, whole on a GPU."""
    import torch

    rows = _WEIGHT // (2 * _COLUMNS)
    weight = torch.randn(rows, _COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    step = CPU_PIECE // (2 * _COLUMNS) if device == "cpu" else rows
    pieces = [weight[first : first + step] for first in range(0, rows, step)]
    largest = amax(weight)

    def compute(piece: torch.Tensor) -> None:
        if name == CARRIED:
            amax(piece)
            return
        kernel = KERNELS[name]
        if kernel.whole:
            amax(piece)  # of the pass that finds the largest of all
        sampled_error(piece, kernel.compute(piece, largest if kernel.whole else None), kernel.limit)

    def once() -> float:
        return _timed(lambda: list(pool.map(compute, pieces)), device)

    once()
    return weight.nbytes / _middle(once)


def _flops(device: str) -> float:
    import torch

    size = 1024 if device == "cpu" else 8192
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)

    def once() -> float:
        return _timed(lambda: left @ left, device)

    once()
    return 2 * size**3 / _middle(once)


def _scores(device: str) -> float:
    """Attention weights a second through the softmax of eager attention: scaled, masked, in float32, and back."""
    import torch

    scores = torch.zeros(8 if device == "cpu" else 256, 1024, 1024, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(1, 1024, 1024, dtype=torch.bfloat16, device=device)

    def softmax() -> torch.Tensor:
        return (scores * 0.1 + mask).softmax(dim=-1, dtype=torch.float32).to(torch.bfloat16)

    def once() -> float:
        return _timed(softmax, device)

    once()
    return scores.numel() / _middle(once)


def _link(device: str) -> float:
    import torch

    there, back = (torch.empty(_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    incoming = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    outgoing = torch.empty_like(incoming)
    cuda: Any = torch.cuda
    streams = [cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        with cuda.stream(streams[0]):
            incoming.copy_(there, non_blocking=True)
        with cuda.stream(streams[1]):
            back.copy_(outgoing, non_blocking=True)

    _timed(both, device)
    return _BYTES / _middle(lambda: _timed(both, device))


def _timed(work: Callable[[], Any], device: str = "cpu") -> float:
    import torch

    started = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _middle(once: Callable[[], float]) -> float:
    return statistics.median(once() for _ in range(_PASSES))


@contextmanager
def _single_threads(torch: Any) -> Iterator[None]:
    """The engine's workers are its threads: PyTorch gets none of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resident() -> int:
    """Memory of this process, which has imported what the stages import, bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
