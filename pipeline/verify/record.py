"""The gate's record of a release, read within bounds and judged again."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import record
from eval.gate import judge
from pipeline.stages.gate import GATE
from pipeline.verify.reading import UnreadableError

if TYPE_CHECKING:
    from eval.gate import GateReport
    from eval.measurements import Measurements
    from pipeline.verify.subject import Subject

_LARGEST = 1 << 29  # bytes that all samples together may unpack to; MMLU takes four million a side


def read(subject: Subject) -> tuple[Measurements, GateReport, GateReport]:
    """The measurements, the recorded judgement, and the judgement that the numbers lead to now.

    Raises `UnreadableError`, or `eval.errors.MeasurementError` for what is no record of the gate.
    """
    name = subject.evidence(GATE)
    try:
        named = list(_named(subject.object(name)))  # bounded, and no key twice
    except (AttributeError, KeyError, TypeError):
        named = []  # it is no record, which the reader says
    room = _LARGEST
    for sample in named:
        if not subject.has(subject.evidence(sample)):
            continue  # the reader says of what it reads that it is missing, or lies elsewhere
        room -= _unpacked(subject.folder / subject.evidence(sample), room)
    measurements, recorded = record.read(subject.folder / name)
    return measurements, recorded, judge(measurements, recorded.policy)


def _named(data: Mapping[str, Any]) -> Iterator[str]:
    """Every file of samples as often as it is named, which is as often as it is read."""
    measured = data["measurements"]
    sides = (entry for both in measured["samples"].values() for entry in both.values())
    for entry in (*sides, *measured["control"].values()):
        yield str(entry["file"])


def _unpacked(path: Path, room: int) -> int:
    """Bytes that a gzip file unpacks to, without keeping any; `UnreadableError` past ``room``."""
    total = 0
    try:
        with gzip.open(path, "rb") as stream:
            while chunk := stream.read(1 << 20):
                total += len(chunk)
                if total > room:
                    raise UnreadableError(f"the samples unpack to more than {_LARGEST:,} bytes")
    except (EOFError, OSError, zlib.error) as error:
        raise UnreadableError(f"{path.name} cannot be unpacked: {error}") from None
    return total
