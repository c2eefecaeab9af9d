"""Where a weight is read from: a tensor on disk, a part of one that stacks experts, or FP8 with block scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from pipeline.engines.stream.kernels import BLOCK
from pipeline.formats.checkpoint import Checkpoint
from pipeline.formats.header import ITEM_BITS, TensorInfo
from pipeline.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file of the source."""

    shard: str
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Origin:
    """What a step reads. ``expert``, ``rows`` and ``transposed`` as in `WeightSource`; ``scale`` holds block scales."""

    place: Place
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    scale: Place | None = None

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the numbers; FP8 is decoded to bfloat16, which its models are run in."""
        return "BF16" if self.scale is not None else self.place.info.dtype

    @property
    def matrix(self) -> tuple[int, int]:
        """[rows, columns] of the matrix on disk that holds it, as it is stored."""
        return self.place.info.shape[-2], self.place.info.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it is written with; [O, I] for a weight."""
        if self.expert is None and self.rows is None and not self.transposed:
            return self.place.info.shape
        outer, inner = self.matrix
        outputs, inputs = (inner, outer) if self.transposed else (outer, inner)
        first, last = self.rows or (0, outputs)
        return last - first, inputs

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it, without its scales."""
        return prod(self.shape) * ITEM_BITS[self.place.info.dtype] // 8

    @property
    def granularity(self) -> int:
        """The number of rows that it must be read in multiples of; all of them where it is stored transposed."""
        if self.transposed:
            return self.shape[0]
        return BLOCK if self.scale is not None else 1

    @property
    def start(self) -> int:
        """Where it begins in its file; where its matrix does, if that is stored transposed."""
        if self.expert is None and self.rows is None:
            return self.place.info.start
        outer, inner = self.matrix
        first = 0 if self.transposed or self.rows is None else self.rows[0]
        width = ITEM_BITS[self.place.info.dtype] // 8
        return self.place.info.start + ((self.expert or 0) * outer + first) * inner * width

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Where the output rows [first, last) lie in the file: the first byte and their number.

        Of a transposed matrix the whole of it, whatever the rows.
        """
        width = ITEM_BITS[self.place.info.dtype] // 8
        if self.transposed:
            return self.start, prod(self.matrix) * width
        row = prod(self.shape[1:]) * width
        return self.start + first * row, (last - first) * row


def origin_of(source: Checkpoint, weight: WeightSource) -> Origin:
    """Find a weight of the model's structure in its files; `KeyError` for a tensor that is not there."""
    return Origin(
        _place(source, weight.tensor),
        weight.expert,
        weight.rows,
        weight.transposed,
        None if weight.scale is None else _place(source, weight.scale),
    )


def copied(source: Checkpoint, name: str, encoded: Mapping[str, str]) -> Origin:
    """A whole tensor as it is, decoded where it is FP8."""
    scale = encoded.get(name)
    return Origin(_place(source, name), scale=None if scale is None else _place(source, scale))


def _place(source: Checkpoint, name: str) -> Place:
    return Place(*source.tensors[name])


def blocks(count: int) -> int:
    """How many blocks of scales cover that many rows or columns."""
    return ceil(count / BLOCK)
