"""A whole checkpoint, several files at a time, resumable at the first file that is not in the manifest."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from pipeline.digest import COMPANION_FILES
from pipeline.engines.stream.error import Error
from pipeline.engines.stream.kernels import fp8_scale
from pipeline.engines.stream.plan import STATIC_ROLES, ShardPlan
from pipeline.engines.stream.shard import PARTIAL_SUFFIX, Stopped, WrittenShard, write_shard
from pipeline.engines.stream.worker import Worker, torch_dtype
from pipeline.errors import StageError
from pipeline.formats.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from pipeline.formats.layout import Choice, layout
from pipeline.store.disk import fsync, write_atomic

if TYPE_CHECKING:
    import torch

_OURS = ("config.json", INDEX_NAME)
CPU_PIECE = 1 << 20  # bytes: with the intermediate results of its parts, a core's second-level cache
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 64 << 20  # bytes; several times a piece
GPU_PIECE = 32 << 20  # bytes: the bus at its full speed
_WORKERS_PER_FILE = 4  # more would wait for their turn at the file's hash
_FILES = 4  # at a time on one device


@dataclass(frozen=True, slots=True)
class Written:
    """What was made: every weight file, and the seconds that it took.

    ``seconds``: "written" and "durable" from the start of the call, the latter including the flush to the disk, and by
    kind of work (read, compute, write, hash, wait, flush) the sum over threads.
    """

    shards: tuple[WrittenShard, ...]
    seconds: Mapping[str, float]

    @property
    def errors(self) -> dict[str, Error]:
        """The error of each quantized module."""
        return {module: error for shard in self.shards for module, error in shard.errors.items()}


def write_checkpoint(
    source: Checkpoint,
    plans: tuple[ShardPlan, ...],
    choice: Choice,
    ranges: Mapping[str, torch.Tensor | float],
    destination: Path,
    *,
    checkpoint_format: str,
    manifest: Path,
    devices: Sequence[str] = ("cpu",),
    with_code: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write the quantized checkpoint into ``destination``, going on where an earlier attempt stopped.

    ``ranges`` holds the largest magnitudes behind each static scale, one a value, by its name. ``manifest`` (JSON
    lines) lists the files that are committed; those are skipped. Files are spread over ``devices``. Raises
    `StageError` when the disk is full, a file cannot be read or a weight is not finite.
    """
    begin = time.perf_counter()
    destination.mkdir(parents=True, exist_ok=True)
    done = _read_manifest(manifest, destination)
    for stale in destination.glob(f"*{PARTIAL_SUFFIX}"):
        stale.unlink()
    try:
        with _many_small_workers():
            missing = [plan for plan in plans if plan.name not in done]
            for plan in plans:
                if plan.name in done:
                    advance(plan.read_bytes)
            run = _Run(source, ranges, destination, manifest, advance)
            try:
                run.write(missing, devices)
            finally:
                done |= run.done
            seconds = run.seconds
            seconds["written"] = max(run.last_byte - begin, 0.0)
        _write_companions(source, destination, with_code=with_code)
        _write_config(source, choice, destination, checkpoint_format)
        if plans[0].name != SINGLE_NAME or (source.folder / INDEX_NAME).is_file():
            _write_index(plans, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(destination).free
            raise StageError(
                f"{destination}: the disk is full: {free:,} bytes are free of {sum(p.nbytes for p in plans):,} in all.",
                hint="Free space and run the same command: finished files are kept.",
            ) from error
        raise StageError(f"{destination}: {error}.") from error
    seconds["durable"] = time.perf_counter() - begin
    return Written(tuple(done[plan.name] for plan in plans), dict(seconds))


class _Run:
    """The files of one call: lanes of workers make one each, a committer behind them flushes what is whole."""

    def __init__(
        self,
        source: Checkpoint,
        ranges: Mapping[str, torch.Tensor | float],
        destination: Path,
        manifest: Path,
        advance: Callable[[int], None],
    ) -> None:
        self._source, self._ranges = source, ranges
        self._destination, self._manifest = destination, manifest
        self._tell, self._lock, self._stop = advance, Lock(), Event()
        self._commits: list[Future[None]] = []
        self._waiting: Iterator[ShardPlan] = iter(())
        self.done: dict[str, WrittenShard] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.last_byte = 0.0

    def write(self, plans: Sequence[ShardPlan], devices: Sequence[str]) -> None:
        """Write and commit files. What was whole is committed also where another file fails."""
        self._waiting = iter(plans)
        lanes = lanes_of(len(plans), devices)
        with ThreadPoolExecutor(1, "commit") as committer, ThreadPoolExecutor(max(len(lanes), 1), "lane") as pool:
            running = [pool.submit(self._lane, device, workers, committer) for device, workers in lanes]
            try:
                wait_for(running)
            finally:
                self._stop.set()  # an interrupt reaches this thread only
        faults = [fault for each in (*running, *self._commits) if (fault := each.exception()) is not None]
        for fault in sorted(faults, key=lambda fault: isinstance(fault, Stopped)):
            raise fault

    def _lane(self, device: str, count: int, committer: ThreadPoolExecutor) -> None:
        workers = [Worker(device) for _ in range(count)]
        try:
            while (plan := self._next()) is not None:
                shard = write_shard(
                    plan,
                    self._source.folder,
                    self._destination,
                    _static_scales(plan, self._ranges),
                    workers=workers,
                    piece=CPU_PIECE if workers[0].device.type == "cpu" else GPU_PIECE,
                    advance=self._advance,
                    stop=self._stop,
                )
                with self._lock:
                    self.last_byte = time.perf_counter()
                    self._commits.append(committer.submit(self._commit, shard))
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                for worker in workers:
                    for kind, spent in worker.seconds.items():
                        self.seconds[kind] += spent

    def _next(self) -> ShardPlan | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._waiting, None)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._tell(count)

    def _commit(self, shard: WrittenShard) -> None:
        start = time.perf_counter()
        partial = self._destination / (shard.name + PARTIAL_SUFFIX)
        fsync(partial)
        partial.replace(self._destination / shard.name)
        fsync(self._destination)
        _append_manifest(self._manifest, shard)
        self.done[shard.name] = shard
        with self._lock:
            self.seconds["flush"] += time.perf_counter() - start


def lanes_of(files: int, devices: Sequence[str]) -> list[tuple[str, int]]:
    """Device and number of workers of each file that is made at a time.

    A CPU gets a worker a core, a few to a file; a GPU as many as keep its bus and the disk busy.
    """
    lanes: list[tuple[str, int]] = []
    for number, device in enumerate(devices):
        share = len(range(number, files, len(devices)))
        if device.startswith("cpu"):
            cores = max(len(os.sched_getaffinity(0)) // devices.count(device), 1)
            count = min(share, -(-cores // _WORKERS_PER_FILE))
            lanes += [(device, -(-cores // count))] * count if count else []
        else:
            lanes += [(device, _WORKERS_PER_FILE)] * min(share, _FILES)
    return lanes


@contextmanager
def _many_small_workers() -> Iterator[None]:
    """Set PyTorch up for threads that each compute little at a time, over and over.

    Workers are threads already: PyTorch starts none of its own below them. And the C library keeps what intermediate
    results gave back: by default it returns such sizes to the system, and taking them again costs a page fault every
    4 KiB, which is twice the time of MXFP4.
    """
    import ctypes

    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(option, _KEPT)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)


def _static_scales(plan: ShardPlan, ranges: Mapping[str, torch.Tensor | float]) -> dict[str, torch.Tensor]:
    """The scales of one file that no weight decides, rounded to the dtype that they are stored in."""
    import torch

    scales: dict[str, torch.Tensor] = {}
    for stored in plan.deferred:
        if stored.role in STATIC_ROLES:
            scale = fp8_scale(torch.as_tensor(ranges[stored.name], dtype=torch_dtype(stored.dtype)))
            if scale.numel() != prod(stored.shape):
                raise StageError(f"{stored.name}: {scale.numel()} ranges were measured, expected {list(stored.shape)}.")
            scales[stored.name] = scale.reshape(stored.shape)
    return scales


def _read_manifest(manifest: Path, destination: Path) -> dict[str, WrittenShard]:
    done: dict[str, WrittenShard] = {}
    if not manifest.is_file():
        return done
    for line in manifest.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            errors = {module: Error(**sums) for module, sums in entry.pop("errors").items()}
            shard = WrittenShard(**entry, errors=errors)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # the line that was being written when the process died
        path = destination / shard.name
        if path.is_file() and path.stat().st_size == shard.size:
            done[shard.name] = shard
    return done


def _append_manifest(manifest: Path, entry: WrittenShard) -> None:
    with manifest.open("a", encoding="utf-8") as stream:
        # A line that was cut short by a crash must not swallow this one.
        stream.write("\n" if stream.tell() else "")
        stream.write(json.dumps(asdict(entry)))
        stream.flush()
        os.fsync(stream.fileno())


def _write_companions(source: Checkpoint, destination: Path, *, with_code: bool) -> None:
    # Code is copied only for a recipe that trusts it.
    patterns = (*COMPANION_FILES, "*.py") if with_code else COMPANION_FILES
    for path in sorted({path for pattern in patterns for path in source.folder.glob(pattern)}):
        if path.is_file() and path.name not in _OURS:
            _write_whole(destination / path.name, path.read_bytes())


def _write_config(source: Checkpoint, choice: Choice, destination: Path, checkpoint_format: str) -> None:
    declared = layout(checkpoint_format).quantization_config(choice)
    config: dict[str, Any] = {**source.config, "quantization_config": declared}
    _write_whole(destination / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _write_index(plans: tuple[ShardPlan, ...], destination: Path) -> None:
    stored = {out.name: (plan.name, out.nbytes) for plan in plans for out in plan.stored}
    index: Mapping[str, Any] = {
        "metadata": {"total_size": sum(size for _, size in stored.values())},
        "weight_map": {name: shard for name, (shard, _) in sorted(stored.items())},
    }
    _write_whole(destination / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _write_whole(path: Path, data: bytes) -> None:
    write_atomic(path, data, temporary=path.with_name(path.name + PARTIAL_SUFFIX))
