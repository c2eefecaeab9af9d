"""One thread's means: a buffer that is read into, a device to compute on, a clock; and two ways of writing a file.

Buffers are kept, because fresh memory costs a page fault every 4 KiB, which is dearer than the copy from the page
cache. Those of a GPU's worker are pinned, so that the bus runs at its full speed beside other workers' computing.

`Buffered` hands every part to the page cache, at any place: memory speed, as long as there are cores to copy with,
which there are beside a GPU. `Direct` collects the parts in their order and lets the disk fetch whole blocks: on a CPU
that computes, copying into fresh pages of the cache would take as many cores as quantizing does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from calibration.lazy import torch
from calibration.weights import decode_blocks
from pipeline.base.errors import StageError
from pipeline.quantize.engines.stream.kernels import BLOCK
from pipeline.quantize.engines.stream.plan import Origin, blocks
from pipeline.quantize.formats.checkpoint import Files, torch_dtype


class Worker:
    """The means of one thread. ``seconds`` counts what it did by kind: read, compute, write, hash, wait."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def clock(self, kind: str) -> Iterator[None]:
        """Count the time of the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start

    def computing(self) -> AbstractContextManager[Any]:
        """Computing on the device, beside what other workers do there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def buffer(self, use: str, size: int) -> torch.Tensor:
        """``size`` bytes of host memory, the same memory again for the same use: uint8 [size]."""
        known = self._buffers.get(use)
        if known is None or known.numel() < size:
            self._buffers.pop(use, None)  # before the new one is made
            known = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._buffers[use] = known
        return known[:size]

    def raw(self, files: Files, origin: Origin, first: int, last: int) -> torch.Tensor:
        """Bytes [first, last) of what an origin holds, counted from its beginning: uint8 on the host."""
        found = self.buffer("read", last - first)
        with self.clock("read"):
            files.read(origin.place.shard, origin.place.info.name, origin.start + first, found.numpy().data)
        return found

    def rows(self, files: Files, origin: Origin, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of a weight on the device, decoded and the right way round: [last - first, I]."""
        start, size = origin.extent(first, last)
        found = self.buffer("read", size)
        with self.clock("read"):
            files.read(origin.place.shard, origin.place.info.name, start, found.numpy().data)
        with self.clock("compute"), self.computing():
            numbers = found.to(self.device, non_blocking=True).view(torch_dtype(origin.place.info.dtype))
            if origin.transposed:
                begin, end = origin.rows or (0, origin.matrix[1])
                return numbers.view(origin.matrix)[:, begin:end].t()[first:last].contiguous()
            numbers = numbers.view(last - first, *origin.shape[1:])
            return numbers if origin.scale is None else self._decoded(files, origin, numbers, first)

    def _decoded(self, files: Files, origin: Origin, numbers: torch.Tensor, first: int) -> torch.Tensor:
        """Rows from ``first`` on, which begins a block, times their blocks' scales, which are read for them."""
        assert origin.scale is not None  # noqa: S101
        rows, columns = numbers.shape
        info = origin.scale.info
        across = blocks(columns)
        dtype = torch_dtype(info.dtype)
        raw = torch.empty(blocks(rows) * across * dtype.itemsize, dtype=torch.uint8)
        place = info.start + first // BLOCK * across * dtype.itemsize
        files.read(origin.scale.shard, info.name, place, raw.numpy().data)
        return decode_blocks(numbers, raw.view(dtype).view(-1, across).to(self.device), (BLOCK, BLOCK))

    def host(self, tensor: torch.Tensor, use: str) -> torch.Tensor:
        """The bytes of a result on the host: uint8, valid until the same use comes again."""
        if self._stream is None:
            return tensor.contiguous().reshape(-1).view(torch.uint8)
        # On the worker's own stream: PyTorch's streams do not wait for the default one, nor does waiting for one of
        # them wait for a copy there, and the buffer would be read before it is filled.
        with self.clock("compute"), self.computing():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            found = self.buffer(use, flat.numel())
            made = _sum(flat)
            found.copy_(flat, non_blocking=True)
            self._stream.synchronize()
            if int(made) != int(_sum(found)):
                raise StageError(
                    f"{self.device}: what was copied to the host is not what the device made.",
                    hint="Run the same command again; should it repeat, the device's memory or its bus is at fault.",
                )
        return found


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum of bytes [n] as integers of 64 bit where they are a multiple of that: any bit that turns changes it."""
    return (flat.view(torch.int64) if flat.numel() % 8 == 0 else flat).sum(dtype=torch.int64)


_CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})  # of tmpfs and some network filesystems
_BLOCK = 4 << 20  # bytes of one direct write; a multiple of every disk's own block
_BLOCKS = 3  # one that is filled, two that are on their way


class Buffered:
    """Through the page cache."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._early: set[int] = set()
        # The disk begins with a part at once, and not when it is asked to flush; its queue may be full, so not here.
        self._starter = ThreadPoolExecutor(1, "flush")
        os.truncate(descriptor, size)

    def early(self, offset: int, data: memoryview) -> None:
        """Take a part in any order, from any thread."""
        self._early.add(offset)
        _write(self._descriptor, data, offset)
        self._starter.submit(_start_flush, self._descriptor, offset, data.nbytes)

    def append(self, offset: int, data: memoryview) -> None:
        """Take a part in its order; one that came early already is known by its offset alone."""
        if offset in self._early:
            self._early.discard(offset)
        else:
            _write(self._descriptor, data, offset)

    def finish(self) -> None:
        """Write the rest. Not yet flushed to the disk for good."""

    def close(self) -> None:
        """Let go of everything, also after a failure."""
        self._starter.shutdown()
        os.close(self._descriptor)


class Direct:
    """Past the page cache: parts are copied into aligned blocks, which another thread writes."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        _reserve(descriptor, size)
        self._writer = ThreadPoolExecutor(1, "direct")
        # Anonymous mappings begin at a page, which is as aligned as any disk wants it.
        self._free = deque(mmap.mmap(-1, _BLOCK) for _ in range(_BLOCKS))
        self._flying: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._block = self._free.popleft()
        self._filled, self._offset = 0, 0

    def early(self, offset: int, data: memoryview) -> None:
        """Do nothing: order is what makes blocks."""

    def append(self, offset: int, data: memoryview) -> None:
        """Take a part in its order."""
        assert offset == self._offset + self._filled, (offset, self._offset, self._filled)  # noqa: S101
        while data.nbytes:
            count = min(data.nbytes, _BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BLOCK:
                self._send()

    def finish(self) -> None:
        """Write the last block whole, and cut the file to its size."""
        if self._filled:
            self._block[self._filled :] = bytes(_BLOCK - self._filled)
            self._send()
        while self._flying:
            self._landed()
        os.truncate(self._descriptor, self._size)

    def close(self) -> None:
        """Let go of everything, also after a failure."""
        self._writer.shutdown()
        os.close(self._descriptor)

    def _send(self) -> None:
        flight = self._writer.submit(_write, self._descriptor, memoryview(self._block), self._offset)
        self._flying.append((flight, self._block))
        self._offset, self._filled = self._offset + _BLOCK, 0
        if not self._free:
            self._landed()
        self._block = self._free.popleft()

    def _landed(self) -> None:
        flight, block = self._flying.popleft()
        self._free.append(block)
        flight.result()


Sink = Buffered | Direct


def open_sink(path: Path, size: int, *, direct: bool) -> Sink:
    """Make a file of ``size`` bytes; direct only where the filesystem can. Errors of the disk are `OSError`."""
    flags, kind = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, Direct if direct and size >= _BLOCK else Buffered
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if kind is Direct else 0), 0o666)
    except OSError as error:
        if kind is Buffered or error.errno not in _CANNOT:
            raise
        kind, descriptor = Buffered, os.open(path, flags, 0o666)
    try:
        return kind(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def _reserve(descriptor: int, size: int) -> None:
    """Have the disk find the room beforehand: twice as fast as block by block, and a full disk is known at once."""
    try:
        _fallocate(descriptor, size)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def _fallocate(descriptor: int, size: int) -> None:
    """The system call: `os.posix_fallocate` writes a byte into every 4 KiB where a filesystem has none.

    NFS has none before 4.2, and each of those bytes would be a message to the server.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _start_flush(descriptor: int, offset: int, size: int) -> None:
    """Have the kernel write a range to the disk, without waiting; where it cannot, all is flushed in the end."""
    start = 2  # SYNC_FILE_RANGE_WRITE
    ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_long(offset), ctypes.c_long(size), start)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        offset += count
        data = data[count:]
