"""One thread's means: a buffer that is read into, a device to compute on, and a clock.

Buffers are kept, because fresh memory costs a page fault every 4 KiB, which is dearer than the copy from the page
cache. Those of a GPU's worker are pinned, so that the bus runs at its full speed beside other workers' computing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.errors import StageError
from pipeline.quantize.engines.stream.kernels import BLOCK
from pipeline.quantize.engines.stream.plan import Origin, blocks

if TYPE_CHECKING:
    import torch

_AHEAD = 64 << 20  # bytes that the kernel is asked to fetch before they are needed


class Files:
    """The source's files, opened when they are first read, for reads from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, shard: str, name: str, offset: int, into: memoryview) -> None:
        """Fill a buffer from one place. Raises `StageError` naming file and tensor."""
        path = self._folder / shard
        try:
            descriptor = self._open.get(shard)
            if descriptor is None:
                # Two threads may both open it: the loser's is closed at once.
                descriptor = os.open(path, os.O_RDONLY)
                if (kept := self._open.setdefault(shard, descriptor)) != descriptor:
                    os.close(descriptor)
                    descriptor = kept
            os.posix_fadvise(descriptor, offset + into.nbytes, _AHEAD, os.POSIX_FADV_WILLNEED)
            while into.nbytes:
                count = os.preadv(descriptor, [into], offset)
                if not count:
                    raise StageError(
                        f"{path}: the file ends inside {name}; it was longer when its header was read.",
                        hint="Restore the file and run the same command: finished files are kept.",
                    )
                offset += count
                into = into[count:]
        except OSError as error:
            raise StageError(f"{path}: {name} cannot be read: {error.strerror}.") from error


class Worker:
    """The means of one thread. ``seconds`` counts what it did by kind: read, compute, write, hash, wait."""

    def __init__(self, device: str) -> None:
        import torch

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
        import torch

        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def buffer(self, use: str, size: int) -> torch.Tensor:
        """``size`` bytes of host memory, the same memory again for the same use: uint8 [size]."""
        import torch

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
        import torch

        from calibration.weights import decode_blocks

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
        import torch

        if self._stream is None:
            return tensor.contiguous().reshape(-1).view(torch.uint8)
        # On the worker's own stream: PyTorch's streams do not wait for the default one, nor does waiting for one of
        # them wait for a copy there, and the buffer would be read before it is filled.
        with self.clock("compute"), self.computing():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            found = self.buffer(use, flat.numel())
            found.copy_(flat, non_blocking=True)
            self._stream.synchronize()
        return found


def torch_dtype(dtype: str) -> torch.dtype:
    """PyTorch's dtype of numbers that are computed with."""
    import torch

    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    return known[dtype]
