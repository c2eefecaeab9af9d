"""One output file: read ahead, compute, write behind.

Reading the next tensor, computing this one and writing the last overlap on three threads; PyTorch, file reads, file
writes and SHA-256 all release the interpreter's lock. The file grows under a temporary name and is renamed when it is
whole and on the disk.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pipeline.engines.stream.kernels import KERNELS
from pipeline.engines.stream.plan import STATIC_ROLES, ShardPlan, Step, is_deferred
from pipeline.errors import StageError
from pipeline.formats.header import TensorInfo
from pipeline.store.disk import fsync

if TYPE_CHECKING:
    import torch

_WRITES_PENDING = 2  # tensors; bounds memory while the disk is slower than the kernels
PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A committed file: its name, its size in bytes and its SHA-256."""

    name: str
    size: int
    sha256: str


def write_shard(
    plan: ShardPlan,
    source: Path,
    destination: Path,
    scalars: Mapping[str, torch.Tensor],
    *,
    device: str,
    advance: Callable[[int], None],
) -> WrittenShard:
    """Quantize one file of ``source`` into ``destination`` and commit it.

    ``scalars`` holds the tensors that no kernel makes, KV scales, by name. ``advance`` is told the bytes read.
    """
    partial = destination / (plan.name + PARTIAL_SUFFIX)
    with (
        (source / plan.name).open("rb", buffering=0) as reader,
        partial.open("wb", buffering=0) as writer,
        ThreadPoolExecutor(1, "read") as reading,
        ThreadPoolExecutor(1, "write") as writing,
    ):
        sink = _Sink(writer)
        sink.write(plan.header)
        held: dict[str, torch.Tensor] = dict(scalars)
        pending: deque[Future[None]] = deque()
        ahead: Future[torch.Tensor] | None = None
        for number, step in enumerate(plan.steps):
            weight = (ahead or reading.submit(_read, reader, step.source)).result()
            following = plan.steps[number + 1 : number + 2]
            ahead = reading.submit(_read, reader, following[0].source) if following else None
            for name, tensor, deferred in _outputs(step, weight, device):
                if deferred:
                    held[name] = tensor
                else:
                    pending.append(writing.submit(sink.write_tensor, tensor))
            while len(pending) > _WRITES_PENDING:
                pending.popleft().result()
            advance(step.source.nbytes)
        for future in pending:
            future.result()
        for stored in plan.deferred:
            sink.write_tensor(held[stored.name])
        os.fsync(writer.fileno())
    partial.replace(destination / plan.name)
    fsync(destination)
    return WrittenShard(plan.name, sink.size, sink.digest.hexdigest())


class _Sink:
    """A file that is written from front to back and hashed on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self.digest.update(view)
        self.size += view.nbytes
        while view.nbytes:  # an unbuffered write may take less than it was given
            view = view[self._stream.write(view) :]

    def write_tensor(self, tensor: torch.Tensor) -> None:
        import torch

        self.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read(stream: BinaryIO, info: TensorInfo) -> torch.Tensor:
    import torch

    buffer = torch.empty(info.nbytes, dtype=torch.uint8)
    view: memoryview = buffer.numpy().data
    try:
        stream.seek(info.start)
        while view.nbytes:
            count = stream.readinto(view)  # type: ignore[attr-defined]  # an unbuffered file is a RawIOBase
            if not count:
                raise StageError(
                    f"{stream.name}: the file ends inside {info.name}; it was longer when its header was read.",
                    hint="Restore the file and run the same command: finished files are kept.",
                )
            view = view[count:]
    except OSError as error:
        raise StageError(f"{stream.name}: {info.name} cannot be read: {error.strerror}.") from error
    return buffer


def _outputs(step: Step, raw: torch.Tensor, device: str) -> list[tuple[str, torch.Tensor, bool]]:
    import torch

    if step.kernel is None:
        (stored,) = step.outputs
        return [(stored.name, raw, is_deferred(stored))]
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[step.source.dtype]
    made = KERNELS[step.kernel](raw.view(dtype).reshape(step.source.shape).to(device))
    return [
        (out.name, made[out.role].reshape(out.shape).cpu(), is_deferred(out))
        for out in step.outputs
        if out.role not in STATIC_ROLES
    ]
