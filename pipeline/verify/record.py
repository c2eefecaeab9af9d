"""The gate's record of a release, read within bounds and judged again."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from eval import record
from eval.gate import judge
from pipeline.stages.gate import GATE
from pipeline.verify.reading import UnreadableError

if TYPE_CHECKING:
    from eval.gate import GateReport
    from eval.measurements import Measurements
    from pipeline.verify.subject import Subject

SAMPLES: Final = "samples/"
_LARGEST = 1 << 29  # bytes that all samples together may unpack to; MMLU takes four million a side


def read(subject: Subject) -> tuple[Measurements, GateReport, GateReport]:
    """The measurements, the recorded judgement, and the judgement that the numbers lead to now.

    Raises `UnreadableError`, or `eval.errors.MeasurementError` for what is no record of the gate.
    """
    name = subject.evidence(GATE)
    subject.object(name)  # bounded, and no key twice
    room = _LARGEST
    for sample in subject.listing.files:
        if sample.startswith(subject.evidence(SAMPLES)):
            room -= _unpacked(subject.folder / sample, room)
    measurements, recorded = record.read(subject.folder / name)
    return measurements, recorded, judge(measurements, recorded.policy)


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
