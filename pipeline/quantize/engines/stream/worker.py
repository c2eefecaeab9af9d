"""One thread's means: a buffer that is read into, a device to compute on, a clock; and a file that is written.

Buffers are kept, because fresh memory costs a page fault every 4 KiB, which is dearer than the copy from the page
cache. Those of a GPU's worker are pinned, so that the bus runs at its full speed beside other workers' computing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from quantmint.calibration.decoders import WHOLE
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.quantize.engines.stream.disk import start_flush
from quantmint.pipeline.quantize.engines.stream.plan import Origin
from quantmint.pipeline.quantize.formats.checkpoint import Files, torch_dtype

_FLUSH = 16 << 20  # bytes of a file that the disk is asked to begin with together


class Worker:
    """Buffers, stream and clock of one worker thread on a device.

    ``seconds`` counts the time by kind of work: read, compute, write, hash, wait.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def clock(self, kind: str) -> Iterator[None]:
        """Add the time of the block to ``seconds[kind]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context that computes on the worker's own CUDA stream; on a CPU it does nothing."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def buffer(self, use: str, size: int) -> torch.Tensor:
        """Return ``size`` bytes of host memory, uint8 [size], pinned for a GPU; the same again for the same ``use``.

        It is replaced by a larger buffer where it is too small.
        """
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(use, None)  # before the new one is made
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._buffers[use] = buffer
        return buffer[:size]

    def raw(self, files: Files, origin: Origin, first: int, last: int) -> torch.Tensor:
        """Return the bytes [first, last) of an origin, counted from its first byte: uint8 on the host.

        They lie in the buffer for reading. Raises `StageError` where they cannot be read.
        """
        raw = self.buffer("read", last - first)
        with self.clock("read"):
            files.read(origin.place.shard, origin.place.info.name, origin.start + first, raw.numpy().data)
        return raw

    def rows(self, files: Files, origin: Origin, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a weight on the device, decoded and not transposed: [last - first, I].

        Raises `StageError` where they cannot be read.
        """
        raw = self._extent(files, origin, first, last)
        with self.clock("compute"), self.computing():
            numbers = raw.to(self.device, non_blocking=True).view(torch_dtype(origin.place.info.dtype))
            if origin.transposed:
                begin, end = origin.rows or (0, origin.matrix[1])
                return numbers.view(origin.matrix)[:, begin:end].t()[first:last].contiguous()
            if origin.is_turned:
                return self._decoded(files, origin, numbers.view(origin.matrix), 0)[first:last]
            if origin.encoded is not None:
                return self._decoded(files, origin, numbers.view(last - first, -1), first)
            return numbers.view(last - first, *origin.shape[1:])

    def stored(self, files: Files, origin: Origin, first: int, last: int) -> list[torch.Tensor]:
        """Return rows [first, last) of an encoded weight on the host as they are stored: its elements, then its scales.

        The elements lie in the buffer for reading. Raises `StageError` where they cannot be read.
        """
        raw = self._extent(files, origin, first, last)
        elements = raw.view(torch_dtype(origin.place.info.dtype)).view(last - first, -1)
        return [elements, *self._scales(files, origin, first, last - first)]

    def _extent(self, files: Files, origin: Origin, first: int, last: int) -> torch.Tensor:
        """Return the bytes of rows [first, last) of a weight, uint8 on the host, in the buffer for reading."""
        start, size = origin.extent(first, last)
        raw = self.buffer("read", size)
        with self.clock("read"):
            files.read(origin.place.shard, origin.place.info.name, start, raw.numpy().data)
        return raw

    def _decoded(self, files: Files, origin: Origin, numbers: torch.Tensor, first: int) -> torch.Tensor:
        """Return the decoded rows of stored elements ``numbers``, which begin with row ``first``; read their scales.

        ``first`` must be a multiple of the number of rows that share scales.
        """
        assert origin.encoded is not None  # noqa: S101
        scales = [scale.to(self.device) for scale in self._scales(files, origin, first, len(numbers))]
        return origin.encoded.rule.decode(numbers, scales)

    def _scales(self, files: Files, origin: Origin, first: int, rows: int) -> list[torch.Tensor]:
        """Return the scales of ``rows`` rows of an encoded weight from row ``first`` on, on the host."""
        assert origin.encoded is not None  # noqa: S101
        rule, scales = origin.encoded.rule, []
        for shared, place in zip(rule.scale_rows, origin.scales, strict=False):
            info = place.info
            begin, end = 0, info.nbytes
            if shared != WHOLE:
                count = info.shape[0] if origin.expert is None else info.shape[0] * info.shape[1]
                above = 0 if origin.expert is None else origin.expert * info.shape[1]
                row = info.nbytes // count
                begin, end = (above + first // shared) * row, (above - (-(first + rows) // shared)) * row
            raw = torch.empty(end - begin, dtype=torch.uint8)
            files.read(place.shard, info.name, info.start + begin, raw.numpy().data, ahead=False)
            scale = raw.view(torch_dtype(info.dtype))
            inner = info.shape[1:] if origin.expert is None else info.shape[2:]
            scales.append(scale.view(-1, *inner))
        return scales

    def host(self, tensor: torch.Tensor, use: str) -> torch.Tensor:
        """Return the bytes of a tensor on the host, uint8 [n].

        On a GPU's worker they are valid until the next call with the same ``use``, and `StageError` is raised where the
        copy differs from the original.
        """
        if self._stream is None:
            return tensor.contiguous().reshape(-1).view(torch.uint8)
        # On the worker's own stream: PyTorch's streams do not wait for the default one, nor does waiting for one of
        # them wait for a copy there, and the buffer would be read before it is filled.
        with self.clock("compute"), self.computing():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            copied = self.buffer(use, flat.numel())
            checksum = _sum(flat)
            copied.copy_(flat, non_blocking=True)
            self._stream.synchronize()
            if int(checksum) != int(_sum(copied)):
                raise StageError(
                    f"{self.device}: what was copied to the host is not what the device made.",
                    hint="Run the same command again; should it repeat, the device's memory or its bus is at fault.",
                )
        return copied


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum, int64, of bytes [n], taken as 64-bit integers where n is a multiple of 8; one bit changes it."""
    return (flat.view(torch.int64) if flat.numel() % 8 == 0 else flat).sum(dtype=torch.int64)


class Sink:
    """A file of ``size`` bytes that any thread may write at any offset. Raises `OSError`."""

    def __init__(self, path: Path, size: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        # The disk begins with a part at once, and not when it is asked to flush; its queue may be full, so not here.
        self._starter, self._unflushed = ThreadPoolExecutor(1, "flush"), 0
        try:
            os.truncate(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset into the page cache; flushing to the disk is started but not awaited."""
        self._unflushed += data.nbytes  # a thread that loses this race starts the flush a part later
        while data.nbytes:
            count = os.pwrite(self._descriptor, data, offset)
            offset += count
            data = data[count:]
        if self._unflushed >= _FLUSH:
            self._flush()

    def close(self) -> None:
        """Start the last flush and close the file, also after a failure."""
        self._flush()
        self._starter.shutdown()
        os.close(self._descriptor)

    def _flush(self) -> None:
        """Have another thread start the flush to the disk."""
        self._unflushed = 0
        self._starter.submit(start_flush, self._descriptor)
