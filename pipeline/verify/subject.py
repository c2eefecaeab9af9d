"""The release under test: its folder, what lies there, what its manifest says, and what is worked out only once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.publish.release import EVIDENCE
from pipeline.verify.reading import LARGEST, Listing, UnreadableError, read_bytes, read_object, read_text

if TYPE_CHECKING:
    from eval.gate import GateReport
    from eval.measurements import Measurements
    from pipeline.formats.checkpoint import Checkpoint
    from pipeline.model.structure import Structure
    from pipeline.progress import Progress
    from pipeline.publish.manifest import Manifest


@dataclass(frozen=True)
class Subject:
    """What the checks look at.

    ``digests`` are the SHA-256 of all files by name, computed here but for those in ``vouched``: their bytes were not
    fetched, the place that holds them says so (their files here have the right size and a header, nothing else).
    ``manifest`` is None where quantmint.json cannot be read. ``tag`` is the release that a person asked for.
    """

    folder: Path
    listing: Listing
    digests: Mapping[str, str]
    manifest: Manifest | None
    progress: Progress
    vouched: Mapping[str, str] = field(default_factory=dict)
    tag: str | None = None

    @property
    def known(self) -> Manifest:
        """The manifest, for checks that are only made where there is one."""
        if self.manifest is None:
            raise LookupError("quantmint.json cannot be read")
        return self.manifest

    def has(self, name: str) -> bool:
        """Whether a file of that name is there, and really in the folder."""
        return name in self.listing.files

    def bytes(self, name: str) -> bytes:
        """The bytes of a file; `UnreadableError` where it is not there or too large."""
        return read_bytes(self._path(name))

    def text(self, name: str) -> str:
        """A file as text."""
        return read_text(self._path(name))

    def object(self, name: str, *, largest: int = LARGEST) -> dict[str, Any]:
        """A file as one JSON object of at most ``largest`` bytes."""
        return read_object(self._path(name), largest=largest)

    def evidence(self, name: str) -> str:
        """The name of a file of the evidence."""
        return f"{EVIDENCE}/{name}"

    def _path(self, name: str) -> Path:
        if not self.has(name):
            raise UnreadableError(f"{name} is not there")
        return self.folder / name

    @cached_property
    def record(self) -> tuple[Measurements, GateReport, GateReport]:
        """The gate's measurements, its recorded judgement, and the one that follows from the numbers now.

        Raises `UnreadableError`, or `eval.errors.MeasurementError` for what is no record.
        """
        from pipeline.verify.record import read

        return read(self)

    @cached_property
    def model(self) -> tuple[Checkpoint, Structure]:
        """The checkpoint by its headers and the modules of its configuration; see `pipeline.verify.model`."""
        from pipeline.verify.model import read

        return read(self)
