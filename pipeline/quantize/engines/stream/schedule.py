"""Assign shard pieces to worker threads of all devices; one thread commits finished files.

Several files are open at a time, because a file's hash takes its bytes in their order: the fewer workers share a file,
the less they wait for each other. A worker goes where the fewest are; so none is idle before the last piece is taken.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from quantmint.calibration.durable import fsync
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.machine import cores as machine_cores
from quantmint.pipeline.quantize.engines.stream.disk import ReadBack
from quantmint.pipeline.quantize.engines.stream.plan import Piece, Scan, ShardPlan
from quantmint.pipeline.quantize.engines.stream.shard import (
    PARTIAL_SUFFIX,
    OpenShard,
    Stopped,
    WrittenShard,
)
from quantmint.pipeline.quantize.engines.stream.switches import many_small_workers
from quantmint.pipeline.quantize.engines.stream.worker import Worker

CPU_PIECE = 2 << 20  # bytes: with the intermediate results of its parts, about a core's own cache
GPU_PIECE = 32 << 20  # bytes: the bus at its full speed
_GPU_WORKERS = 8  # of each GPU: more wait for the interpreter, fewer leave the bus or the disk idle
_OPEN_FILES = 8  # at a time; more would only be more places on the disk


@dataclass(frozen=True, slots=True)
class Order:
    """Output files to make, here or elsewhere, from the folder ``source`` into the folder ``destination``.

    ``scalars`` returns the tensors of a file that no kernel makes. ``advance`` is called with the bytes read.
    ``commit``, called for one file at a time, gets a file that is complete, flushed and read back, and its temporary
    path.
    """

    plans: Sequence[ShardPlan]
    source: Path
    destination: Path
    scalars: Callable[[ShardPlan], Mapping[str, torch.Tensor]]
    advance: Callable[[int], None]
    commit: Callable[[WrittenShard, Path], None]


WriteShards = Callable[[Order], dict[str, float]]
"""Makes files, here or elsewhere; see `write_shards` for what it returns."""


def workers_of(devices: Sequence[str], cores: int | None = None) -> list[str]:
    """Return the device of each worker: as many as there are ``cores`` for a CPU, a fixed number for each GPU.

    ``cores`` None means all cores of this process.
    """
    ours = machine_cores() if cores is None else cores
    cores = max(ours // max(sum(_is_cpu(device) for device in devices), 1), 1)
    return [device for device in devices for _ in range(cores if _is_cpu(device) else _GPU_WORKERS)]


def open_files(files: int, workers: int) -> int:
    """Return how many of ``files`` are written at a time by ``workers`` threads."""
    return min(files, workers, _OPEN_FILES)


def write_shards(
    order: Order, devices: Sequence[str], *, cores: int | None = None, suffix: str = PARTIAL_SUFFIX
) -> dict[str, float]:
    """Make the files of an order on ``devices``, and have each committed; return the seconds spent.

    ``cores`` is the number of CPU cores to use (None: all of this process), ``suffix`` the end of a file's name until
    it is committed. The seconds are "written", until the last byte was handed to the operating system, and for each
    kind of work the sum over threads. Complete files are committed even where another file fails; then the first
    failure is raised, see `OpenShard.make`, or `StageError` where the disk does not hold what was written.
    """
    schedule = _Schedule(order, workers_of(devices, cores), suffix)
    with many_small_workers():
        return schedule.run()


class _Schedule:
    def __init__(self, order: Order, workers: Sequence[str], suffix: str) -> None:
        self._order = order
        self._suffix = suffix
        self._waiting: Iterator[ShardPlan] = iter(order.plans)
        self._devices = workers
        self._limit = open_files(len(order.plans), len(self._devices))
        self._piece = CPU_PIECE if all(map(_is_cpu, workers)) else GPU_PIECE
        self._lock, self._telling, self._committing = Lock(), Lock(), Lock()
        self._open: list[OpenShard] = []
        self._busy: Counter[OpenShard] = Counter()
        self._stopped = False
        self._failure: BaseException | None = None
        self._seconds: dict[str, float] = defaultdict(float)

    def run(self) -> dict[str, float]:
        begin = time.perf_counter()
        self._last = begin
        with (
            ThreadPoolExecutor(_OPEN_FILES, "commit") as committer,
            ThreadPoolExecutor(max(len(self._devices), 1), "worker") as pool,
        ):
            running = [pool.submit(self._work, device, committer) for device in self._devices]
            try:
                wait_for(running)
            finally:
                self._stop()  # an interrupt reaches this thread only
        for shard in self._open:
            shard.discard()
        if self._failure is not None:
            raise self._failure
        self._seconds["written"] = self._last - begin
        return self._seconds

    def _work(self, device: str, committer: ThreadPoolExecutor) -> None:
        worker = Worker(device)
        try:
            while (taken := self._take()) is not None:
                shard, piece = taken
                written = shard.make(worker, piece)
                with self._lock:
                    self._busy[shard] -= 1
                if written is not None:
                    self._close(shard, written, committer)
        except Stopped:
            pass  # the failure that stopped this worker is raised in its place
        except BaseException as error:
            self._fail(error)
        finally:
            with self._lock:
                for kind, spent in worker.seconds.items():
                    self._seconds[kind] += spent

    def _take(self) -> tuple[OpenShard, Scan | Piece] | None:
        """Return a file and its next task; None where none is left. Raises `Stopped` after a failure.

        The file is the one with the fewest workers; a new file is opened before two workers share one.
        """
        with self._lock:
            if self._stopped:
                raise Stopped
            for shard in sorted(self._open, key=self._busy.__getitem__):
                if self._busy[shard] and (fresh := self._open_next()) is not None:
                    shard = fresh
                if (piece := shard.take()) is not None:
                    self._busy[shard] += 1
                    return shard, piece
            while (fresh := self._open_next()) is not None:
                if (piece := fresh.take()) is not None:
                    self._busy[fresh] += 1
                    return fresh, piece
            return None

    def _open_next(self) -> OpenShard | None:
        if len(self._open) >= self._limit or (plan := next(self._waiting, None)) is None:
            return None
        shard = OpenShard(
            plan,
            self._order.source,
            self._order.destination / (plan.name + self._suffix),
            self._order.scalars(plan),
            piece=self._piece,
            advance=self._advance,
        )
        self._open.append(shard)
        return shard

    def _close(self, shard: OpenShard, written: WrittenShard, committer: ThreadPoolExecutor) -> None:
        shard.close()
        with self._lock:
            self._open.remove(shard)
            self._last = time.perf_counter()
            committer.submit(self._commit, written, shard.read_back)

    def _commit(self, shard: WrittenShard, read_back: ReadBack) -> None:
        """Flush a file, finish its comparison with what was hashed, and commit it; other files go on.

        Failures are passed to `_fail`.
        """
        begin = time.perf_counter()
        path = self._order.destination / (shard.name + self._suffix)
        try:
            if path.exists():  # else an earlier try came as far as the commit
                fsync(path)
                if not read_back.finish():
                    raise StageError(
                        f"{path}: what lies on the disk is not what was written.",
                        hint="Run the same command again; should it repeat, look at the disk and the memory.",
                    )
            with self._committing:
                self._order.commit(shard, path)
        except BaseException as error:  # a disk that refuses one file refuses the next: no worker begins it
            self._fail(error)
        read_back.close()
        with self._lock:
            self._seconds["flush"] += time.perf_counter() - begin

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure, which `run` raises, and stop all workers."""
        with self._lock:
            self._failure = self._failure or error
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            shards = list(self._open)
        for shard in shards:
            shard.stop()

    def _advance(self, count: int) -> None:
        with self._telling:
            self._order.advance(count)


def _is_cpu(device: str) -> bool:
    return device.startswith("cpu")
