"""One output file, made by any number of workers at once, and how far its weights are from their source.

Each takes the next piece, reads it and computes it; where its result belongs was promised by the header. Then it waits
for its turn: the file's SHA-256 takes the bytes in their order, and so do the few results that are written when a
weight is whole. Nothing is held but each worker's piece.

The error is taken while both are at hand. A GPU, which waits for its bus, compares everything, and proves by a sum that
what is hashed on the host is what it made. A CPU compares one row in 64, which costs a few percent and moves the ratio
of a real weight by hundredths of a decibel; all rows would cost more than quantizing them does.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Condition

from quantmint.calibration.elements import bits, power
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.quantize.engines.stream.disk import ReadBack, Sum, sum_of
from quantmint.pipeline.quantize.engines.stream.plan import (
    NUMBERS,
    STATIC_ROLES,
    Origin,
    Piece,
    Scan,
    ShardPlan,
    Step,
    cut,
    is_deferred,
)
from quantmint.pipeline.quantize.engines.stream.worker import Sink, Worker
from quantmint.pipeline.quantize.formats.checkpoint import Files, torch_dtype
from quantmint.pipeline.quantize.formats.layout import StoredTensor
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import amax
from quantmint.pipeline.quantize.schemes.scheme import Parts

_STRIDE = 64


def error_of(weight: torch.Tensor, encoded: Parts, kernel: str) -> Error:
    """Return the error of rows of a ``weight`` [O, I] against what ``kernel`` encoded of them.

    On a CPU one row in 64 is compared, on a GPU every row.
    """
    stride = _STRIDE if weight.device.type == "cpu" else 1
    source = weight[::stride].float()
    restored = KERNELS[kernel].sample(encoded, stride)
    # By rows in float32 and over rows in float64; one wait for a GPU, not two.
    sums = [numbers.square().sum(1).double().sum() for numbers in (source, source - restored)]
    signal, noise = torch.stack(sums).tolist()
    return Error(signal, noise, source.numel())


PARTIAL_SUFFIX = ".partial"
ERRORS = "errors"
"""Where a file of what was made says, as JSON by step, how far each is from the weight that it was made of."""


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A written file: name, size in bytes, SHA-256 in hex, and the rounding error of each module quantized into it."""

    name: str
    size: int
    sha256: str
    errors: Mapping[str, Error] = field(default_factory=dict)


class Stopped(Exception):  # noqa: N818 - not a failure of the worker that meets it
    """Raised in workers after another failure, or when the run is interrupted."""


class OpenShard:
    """An output file while workers make it: its remaining tasks, and the state that its workers share.

    ``source`` is the folder to read from, ``path`` the file's name until it is committed. ``scalars`` holds the tensors
    that no kernel makes, by name. ``piece`` is the bytes of a worker's task, ``advance`` is called with the bytes read.
    A complete file is not yet flushed to the disk, and ``read_back`` is left to finish and to close. Raises `OSError`
    where the file cannot be created.
    """

    def __init__(
        self,
        plan: ShardPlan,
        source: Path,
        path: Path,
        scalars: Mapping[str, torch.Tensor],
        *,
        piece: int,
        advance: Callable[[int], None],
    ) -> None:
        self._plan, self._source, self._advance = plan, source, advance
        self._files = Files(source)
        self._path = path
        self._sink = Sink(self._path, plan.nbytes)
        pieces = cut(plan, piece)
        self._pieces: deque[Scan | Piece] = deque(pieces)
        self._left = len(pieces)
        self._changed = Condition()
        self._turn = 0
        self._stopped = False
        self._unscanned: defaultdict[tuple[Origin, ...], int] = defaultdict(int)
        for task in pieces:
            if isinstance(task, Scan):
                self._unscanned[task.group] += 1
        self._largest: dict[tuple[Origin, ...], torch.Tensor] = {}
        self._collected: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self._held: dict[str, torch.Tensor] = dict(scalars)
        self._errors: defaultdict[str, Error] = defaultdict(Error)
        self._digest = hashlib.sha256()
        self.read_back = ReadBack(path)
        self._append(0, memoryview(plan.header))

    def take(self) -> Scan | Piece | None:
        """Return the next task, which the caller must make; None where all are taken. Call it from one thread only."""
        return self._pieces.popleft() if self._pieces else None

    def make(self, worker: Worker, piece: Scan | Piece) -> WrittenShard | None:
        """Make a task; return the file's facts if that completes the file, else None.

        Raises `StageError` for a weight that cannot be read, is not finite or was corrupted on its way from a GPU,
        `OSError` for a file that cannot be written, and `Stopped` soon after `stop`.
        """
        if isinstance(piece, Scan):
            self._scan(worker, piece)
        elif piece.raw:
            self._carry(worker, piece)
        else:
            self._quantize(worker, piece)
        with self._changed:
            self._left -= 1
            if self._left:
                return None
        for stored in self._plan.deferred:
            self._append(self._plan.offsets[stored.name], _bytes(self._held[stored.name]))
        return WrittenShard(self._plan.name, self._plan.nbytes, self._digest.hexdigest(), dict(self._errors))

    def stop(self) -> None:
        """Have every worker that waits in this file raise `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the source's files and the output file."""
        self._sink.close()
        self._files.close()

    def discard(self) -> None:
        """Close all files and delete the unfinished output file: no later attempt resumes in the middle of a file."""
        self.close()
        self.read_back.close()
        self._path.unlink(missing_ok=True)

    def _scan(self, worker: Worker, scan: Scan) -> None:
        weight = worker.rows(self._files, scan.origin, scan.first, scan.last)
        with worker.clock("compute"), worker.computing():
            largest = amax(weight).cpu()
        self._require_finite(scan.origin, largest)
        with self._changed:
            so_far = self._largest.get(scan.group, largest)
            self._largest[scan.group] = so_far.maximum(largest)
            self._unscanned[scan.group] -= 1
            self._changed.notify_all()

    def _carry(self, worker: Worker, piece: Piece) -> None:
        (stored,) = piece.step.outputs
        data = worker.raw(self._files, piece.step.origin, piece.first, piece.last)
        if stored.dtype in NUMBERS and data.numel():
            with worker.clock("compute"):
                self._require_finite(piece.step.origin, amax(data.view(torch_dtype(stored.dtype))))
        if is_deferred(stored):
            self._hand_over(worker, piece, smalls=[(stored, data.clone())])
        else:
            self._hand_over(worker, piece, main=(self._plan.offsets[stored.name] + piece.first, data))

    def _quantize(self, worker: Worker, piece: Piece) -> None:
        step = piece.step
        if step.untouched and step.made is None:
            self._pass(worker, piece)
            return
        weight = worker.rows(self._files, step.origin, piece.first, piece.last)
        largest = self._largest_of(worker, step) if step.group else None
        with worker.clock("compute"), worker.computing():
            parts, error = self._compute(piece, weight, largest)
        self._store(worker, piece, {role: worker.host(part, role) for role, part in parts.items()}, error)

    def _pass(self, worker: Worker, piece: Piece) -> None:
        """Write the bytes of a weight whose source has the scheme's format; a scale that is not finite is refused."""
        step = piece.step
        parts = [bits(part) for part in worker.stored(self._files, step.origin, piece.first, piece.last)]
        with worker.clock("compute"):
            for number, part in enumerate(parts):
                self._require_finite(step.origin, _largest_stored(part, is_scale=number > 0))
        encoded = step.origin.encoded
        if encoded is not None and encoded.encoding == "fp8_tensor":  # which becomes FP8 by channel
            parts[1] = parts[1].reshape(1).repeat(piece.last - piece.first)
        elif encoded is not None and encoded.encoding == "fp8_block_e8m0":
            parts[1] = power(parts[1])
        roles = (out.role for out in step.outputs if out.role not in STATIC_ROLES)
        flat = {role: part.reshape(-1).view(torch.uint8) for role, part in zip(roles, parts, strict=True)}
        self._store(worker, piece, flat, Error(count=(piece.last - piece.first) * step.origin.shape[1]))

    def _store(self, worker: Worker, piece: Piece, parts: Parts, error: Error) -> None:
        """Write the ``parts`` of a piece, bytes on the host by role, and its error."""
        main, *small_outputs = (out for out in piece.step.outputs if out.role not in STATIC_ROLES)
        smalls = [(out, parts[out.role].clone()) for out in small_outputs]
        data = parts[main.role]
        if is_deferred(main):
            self._hand_over(worker, piece, smalls=[(main, data.clone()), *smalls], error=error)
        else:
            place = self._plan.offsets[main.name] + piece.first * (main.nbytes // main.shape[0])
            self._hand_over(worker, piece, main=(place, data), smalls=smalls, error=error)

    def _compute(self, piece: Piece, weight: torch.Tensor, largest: torch.Tensor | None) -> tuple[Parts, Error]:
        step = piece.step
        parts, error = _read_finished(piece, weight.device) if step.made is not None else ({"copy": weight}, Error())
        if step.kernel is None:
            self._require_finite(step.origin, amax(parts["copy"]))
            return parts, error
        kernel = KERNELS[step.kernel]
        if step.made is None:
            parts = kernel.compute(weight, largest)
        scale = parts["weight_scale"]
        if scale.is_floating_point():  # it was made from the largest number
            self._require_finite(step.origin, scale)
        elif step.made is not None or (scale.numel() and int(scale.amax()) >= kernel.uncertain):
            self._require_finite(step.origin, amax(weight))
        return parts, error if step.made is not None else error_of(weight, parts, step.kernel)

    def _largest_of(self, worker: Worker, step: Step) -> torch.Tensor:
        with self._changed, worker.clock("wait"):
            self._changed.wait_for(lambda: self._stopped or not self._unscanned[step.group])
            if self._stopped:
                raise Stopped
        return self._largest[step.group].to(worker.device)

    def _hand_over(
        self,
        worker: Worker,
        piece: Piece,
        *,
        main: tuple[int, torch.Tensor] | None = None,
        smalls: Sequence[tuple[StoredTensor, torch.Tensor]] = (),
        error: Error | None = None,
    ) -> None:
        """Write ``main`` (offset, bytes) at once; when all earlier pieces are handed over, hash it and store the rest.

        ``smalls`` are parts of small results, ``error`` is the piece's rounding error. Raises `Stopped` after `stop`.
        """
        if main is not None:
            with worker.clock("write"):
                self._sink.write(main[0], _bytes(main[1]))
        with self._changed, worker.clock("wait"):
            self._changed.wait_for(lambda: self._stopped or self._turn == piece.number)
            if self._stopped:
                raise Stopped
        # From here to the end only this thread has the turn.
        if main is not None:
            with worker.clock("hash"):
                self._hash(main[0], _bytes(main[1]))
        for stored, part in smalls:
            self._collect(piece, stored, part)
        if error is not None and piece.step.kernel is not None:
            self._errors[piece.step.name] += error
        self._advance(piece.nbytes)
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def _collect(self, piece: Piece, stored: StoredTensor, part: torch.Tensor) -> None:
        """Store a part of a small result; with the last piece, write all of it, or hold it for the file's end."""
        if prod(stored.shape) == 1:
            self._collected[stored.name] = [part]  # one scale, which every piece of its weight has made
        else:
            self._collected[stored.name].append(part)
        if not piece.final:
            return
        tensor = torch.cat(self._collected.pop(stored.name))
        if is_deferred(stored):
            self._held[stored.name] = tensor
        else:
            self._append(self._plan.offsets[stored.name], _bytes(tensor))

    def _append(self, offset: int, data: memoryview) -> None:
        self._sink.write(offset, data)
        self._hash(offset, data)

    def _hash(self, offset: int, data: memoryview) -> None:
        self._digest.update(data)
        self.read_back.add(Sum(offset, data.nbytes, sum_of(data)))

    def _require_finite(self, origin: Origin, largest: torch.Tensor) -> None:
        if not bool(largest.float().isfinite().all()):
            place = origin.place
            raise StageError(
                f"{self._source / place.shard}: {place.info.name} holds numbers that are not finite.",
                hint="The source is damaged or was saved in the middle of a diverging training: fetch it again.",
            )


def _read_finished(piece: Piece, device: torch.device) -> tuple[Parts, Error]:
    """Return the rows of a piece from the file ``step.made``, by role as its kernel would return them, and an error.

    The error is the step's for its last piece, else empty.
    """
    from safetensors import safe_open

    step, parts = piece.step, {}
    with safe_open(str(step.made), framework="pt") as stored:
        for output in step.outputs:
            name = f"{step.name}.{output.role}"
            if name in stored.keys():  # noqa: SIM118 - it is no mapping
                part = stored.get_slice(name)
                rows = part[piece.first : piece.last] if part.get_shape() else stored.get_tensor(name)
                parts[output.role] = rows.to(device)
        error = json.loads(stored.metadata()[ERRORS]).get(step.name) if piece.final else None
    return parts, Error() if error is None else Error(*error)


_E8M0_NAN, _E4M3_NAN = 0xFF, 0x7F


def _largest_stored(part: torch.Tensor, *, is_scale: bool) -> torch.Tensor:
    """Return a number that is not finite if a tensor of stored elements or scales holds one that is not."""
    if part.dtype in (torch.float8_e4m3fn, torch.uint8):
        is_e4m3 = part.dtype == torch.float8_e4m3fn
        codes = part.view(torch.uint8) & 0x7F if is_e4m3 else part
        broken = (is_e4m3 or is_scale) and codes.numel() and int(codes.amax()) == (_E4M3_NAN if is_e4m3 else _E8M0_NAN)
        return torch.tensor(float("nan") if broken else 0.0)
    return amax(part) if part.is_floating_point() else torch.tensor(0.0)


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view
