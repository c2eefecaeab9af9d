"""A few seconds of what the stages do, timed on this machine.

What the engine's workers do is done on all cores at once, for what counts is what they get done together: a memory bus
that one thread fills does not give two threads twice as much. Each thread is timed by itself, so that starting it is
not counted; their rates add up. The middle of three passes is taken.
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
from threading import Barrier
from typing import Any

from pipeline.cost.rates import Rates
from pipeline.cost.volume import CARRIED
from pipeline.engines.stream.error import sampled_error
from pipeline.engines.stream.kernels import KERNELS, amax
from pipeline.engines.stream.schedule import CPU_PIECE, GPU_PIECE, workers_of
from pipeline.engines.stream.worker import Worker
from pipeline.store.disk import fsync

_BYTES = 256 << 20  # more than a last-level cache holds
_LEAST = 8 << 20  # bytes of a file
_REPEATS = 4
_COLUMNS = 4096
_PASSES = 3


def probe(device: str, store: Path, machine: str) -> Rates:
    """Measure this machine; ``store`` is a folder on the filesystem that checkpoints are written to."""
    import torch

    torch.zeros(1, device=device)  # a device's context takes memory of the host
    resident = _resident()
    cores = len(os.sched_getaffinity(0))
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=store) as folder, ThreadPoolExecutor(cores) as pool:
        files = _Files(Path(folder), pool, cores)
        write, sync = files.write()
        read = _middle(files.read)
        disk = files.read_cold()
        hashed = _middle(files.hash)
        load = _load(Path(folder), device)
        with _single_threads(torch):
            kernels = {name: _kernel(name, device) for name in (*KERNELS, CARRIED)}
    return Rates(
        machine=machine,
        device_kind=torch.device(device).type,
        read=read,
        disk=disk,
        write=write,
        sync=sync,
        hash=hashed,
        load=load,
        kernels=kernels,
        link=None if device == "cpu" else _link(device),
        flops=_flops(device),
        scores=_scores(device),
        resident=resident,
    )


class _Files:
    """A file a core; each method gives bytes a second."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, cores: int) -> None:
        self._paths = [folder / str(number) for number in range(cores)]
        self._pool = pool
        self._data = os.urandom(max(_BYTES // cores, _LEAST))
        self._buffers = [bytearray(CPU_PIECE) for _ in self._paths]

    def write(self) -> tuple[float, float]:
        """To the system, and from there to the disk.

        The first pass may be spent on memory that a virtual machine gets from its host only now.
        """
        written, synced = [], []
        for _ in range(_PASSES):
            for path in self._paths:
                path.unlink(missing_ok=True)
            written.append(self._together(lambda number: self._paths[number].write_bytes(self._data)))
            synced.append(len(self._paths) * len(self._data) / _timed(lambda: list(map(fsync, self._paths))))
        return statistics.median(written), statistics.median(synced)

    def read(self) -> float:
        """From the page cache."""
        return self._together(self._read)

    def read_cold(self) -> float:
        """From the disk."""
        for path in self._paths:
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        return self._together(self._read)

    def hash(self) -> float:
        """By one thread, while all do so."""
        return self._together(lambda _: hashlib.sha256(self._data).digest()) / len(self._paths)

    def _read(self, number: int) -> None:
        with self._paths[number].open("rb", buffering=0) as stream:
            while stream.readinto(self._buffers[number]):
                pass

    def _together(self, work: Callable[[int], Any]) -> float:
        return _together(self._pool, len(self._paths), work) * len(self._data)


def _together(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], Any]) -> float:
    """How often a second ``work`` is done by so many threads, each of which gets its number."""
    gate = Barrier(threads)

    def one(number: int) -> float:
        gate.wait()
        return 1 / _timed(lambda: work(number))

    return sum(pool.map(one, range(threads)))


def _load(folder: Path, device: str) -> float:
    """Bytes a second from a mapped file to the device, by one thread: how calibration gets its weights."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    count = _BYTES // _LEAST
    save_file({str(number): torch.ones(_LEAST // 2, dtype=torch.bfloat16) for number in range(count)}, path)

    def work() -> None:
        with safe_open(path, "pt") as weights:
            for number in range(count):
                weights.get_tensor(str(number)).to(device, copy=True)

    return _middle(lambda: count * _LEAST / _timed(work, device))


def _kernel(name: str, device: str) -> float:
    """Bytes of bfloat16 weight a second, by as many workers as the engine has for a checkpoint of several files.

    On a GPU too: what its workers do between kernels is done by one interpreter.
    """
    import torch

    piece = CPU_PIECE if device == "cpu" else GPU_PIECE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(piece // (2 * _COLUMNS), _COLUMNS, generator=generator).bfloat16().to(device)
    largest = amax(weight)
    workers = [Worker(each) for each in workers_of([device])]

    def compute() -> None:
        if name == CARRIED:
            bool(amax(weight).isfinite())
            return
        kernel = KERNELS[name]
        if kernel.whole:
            bool(amax(weight).isfinite())  # of the pass that finds the largest of all
        sampled_error(weight, kernel.compute(weight, largest if kernel.whole else None), kernel.limit)

    def repeat(number: int) -> None:
        with workers[number].computing():
            for _ in range(_REPEATS):
                compute()

    with ThreadPoolExecutor(len(workers)) as pool:
        _together(pool, len(workers), repeat)
        return weight.nbytes * _REPEATS * _middle(lambda: _together(pool, len(workers), repeat))


def _flops(device: str) -> float:
    import torch

    size = 1024 if device == "cpu" else 8192
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)  # zeros would take less power, and time

    def once() -> float:
        return 2 * size**3 / _timed(lambda: left @ left, device)

    once()
    return _middle(once)


def _scores(device: str) -> float:
    """Attention weights a second through the softmax of eager attention: scaled, masked, in float32, and back."""
    import torch

    scores = torch.zeros(8 if device == "cpu" else 256, 1024, 1024, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(1, 1024, 1024, dtype=torch.bfloat16, device=device)

    def softmax() -> torch.Tensor:
        return (scores * 0.1 + mask).softmax(dim=-1, dtype=torch.float32).to(torch.bfloat16)

    def once() -> float:
        return scores.numel() / _timed(softmax, device)

    once()
    return _middle(once)


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
    return _middle(lambda: _BYTES / _timed(both, device))


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
