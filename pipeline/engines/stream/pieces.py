"""A file's work, cut into pieces that any worker can take: rows of a weight, or bytes of what is carried over.

Pieces are numbered in the order of the file. A scale of a whole weight needs its largest magnitude first: scans come
before the pieces that wait for them, so that workers who take what is next can never wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from pipeline.engines.stream.kernels import KERNELS
from pipeline.engines.stream.origin import Origin
from pipeline.engines.stream.plan import ShardPlan, Step

_WORD = 8  # bytes; no number is cut in two


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows [first, last) of ``origin``, whose largest magnitude counts for ``group``."""

    origin: Origin
    group: tuple[Origin, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a step; bytes of it where ``raw``. ``final`` marks a step's last piece."""

    step: Step
    number: int
    first: int
    last: int
    raw: bool
    final: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the input."""
        if self.raw:
            return self.last - self.first
        origin = self.step.origin
        return origin.nbytes * (self.last - self.first) // max(origin.shape[0], 1)


def cut(plan: ShardPlan, size: int) -> list[Scan | Piece]:
    """Cut a file into pieces of about ``size`` bytes of the input; more where fewer rows cannot be computed apart."""
    found: list[Scan | Piece] = []
    scanned: set[tuple[Origin, ...]] = set()
    number = 0
    for step in plan.steps:
        if step.group and step.group not in scanned:
            scanned.add(step.group)
            found += (
                Scan(origin, step.group, first, last)
                for origin in step.group
                for first, last in _ranges(origin.shape[0], _rows(origin, 1, size))
            )
        raw = _is_raw(step)
        ranges = list(
            _ranges(step.origin.nbytes, max(size // _WORD, 1) * _WORD) if raw else _ranges(*_rows_of(step, size))
        )
        for first, last in ranges:
            found.append(Piece(step, number, first, last, raw, final=last == ranges[-1][1]))
            number += 1
    return found


def _is_raw(step: Step) -> bool:
    origin = step.origin
    return step.kernel is None and origin.scale is None and not origin.transposed


def _rows_of(step: Step, size: int) -> tuple[int, int]:
    kernel = 1 if step.kernel is None else KERNELS[step.kernel].rows
    return step.origin.shape[0], _rows(step.origin, kernel, size)


def _rows(origin: Origin, kernel: int, size: int) -> int:
    count = origin.shape[0]
    apart = origin.granularity if origin.transposed else lcm(kernel, origin.granularity)
    return max(size // max(origin.nbytes // max(count, 1), 1) // max(apart, 1), 1) * max(apart, 1)


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [0, count) into ranges of ``step``; a single empty one where there is nothing."""
    yield from ((first, min(first + step, count)) for first in range(0, count, step)) if count else ((0, 0),)
