"""The release under test, read as what a stranger wrote, and the answer to a question about it.

No key twice, nothing that lies elsewhere, no code that is run; and what several checks need is worked out once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from quantmint.eval import record as gate_record
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import GateReport, judge
from quantmint.eval.measurements import Measurements
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.manifest import Manifest, strict_object
from quantmint.pipeline.publish.release import CARD, EVIDENCE, UNLISTED
from quantmint.pipeline.quantize.digest import NAMED_TEMPLATES, folder_digest

if TYPE_CHECKING:
    from quantmint.pipeline.base.progress import Progress


LARGEST: Final = 1 << 25
"""Bytes of a text that is read whole. Parsed, they take about twenty times as much memory."""
UNSIGNED: Final = "CONSISTENT, UNSIGNED"
"""Conclusion about a release that agrees with itself and that nobody signed."""
_ASIDE = (".git/", ".cache/huggingface/")
"""What the Hub and its clients put beside a release: no part of it, and read by nothing that serves it."""


class CheckOutcome(Enum):
    """How a check ended. What could not be looked at is never OK."""

    OK = "OK"
    FAILS = "FAILS"
    NOT_CHECKED = "NOT CHECKED"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: ``reason`` is a sentence, ``details`` are further ones; both may quote what a stranger wrote.

    ``vouched`` is False for the check of a signature that is OK because the reader accepts that there is none.
    """

    name: str
    outcome: CheckOutcome
    reason: str
    details: tuple[str, ...] = ()
    vouched: bool = True

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {**asdict(self), "outcome": self.outcome.value, "details": list(self.details)}


def conclude(name: str, faults: Sequence[str], holds: str) -> CheckResult:
    """FAILS with every fault, the first as its reason; OK where there is none, with ``holds``."""
    if faults:
        return CheckResult(name, CheckOutcome.FAILS, faults[0], tuple(faults[1:]))
    return CheckResult(name, CheckOutcome.OK, holds)


def failure(name: str, reason: str, *details: str) -> CheckResult:
    """A check that found a contradiction."""
    return CheckResult(name, CheckOutcome.FAILS, reason, details)


def not_checked(name: str, reason: str, *details: str) -> CheckResult:
    """A check that could not be made, and why."""
    return CheckResult(name, CheckOutcome.NOT_CHECKED, reason, details)


def first_five(faults: Sequence[str], what: str) -> list[str]:
    """The first five of many, and how many more ``what`` there are."""
    more = [f"{len(faults) - 5} more {what}"] if len(faults) > 5 else []
    return [*faults[:5], *more]


def exit_code(checks: Sequence[CheckResult]) -> int:
    """1 where something fails, 3 where nothing does but something could not be checked, else 0."""
    outcomes = {check.outcome for check in checks}
    return 1 if CheckOutcome.FAILS in outcomes else 3 if CheckOutcome.NOT_CHECKED in outcomes else 0


def conclusion(checks: Sequence[CheckResult]) -> str:
    """VERIFIED, FAILS or NOT ALL CHECKED; CONSISTENT, UNSIGNED where all holds and nobody vouches for it."""
    code = exit_code(checks)
    if code == 0 and not all(check.vouched for check in checks):
        return UNSIGNED
    return {0: "VERIFIED", 1: "FAILS", 3: "NOT ALL CHECKED"}[code]


class UnreadableError(UserError):
    """A file is not there, too large, or not what its name says; the message names it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a folder: sizes in bytes of regular files by name, and in words what else there is."""

    files: dict[str, int]
    strange: tuple[str, ...]


def listing(folder: Path) -> Listing:
    """Look at every name below a folder without opening one.

    A symbolic link counts as the file that it leads to where that lies in the folder, or among the blobs of the Hub's
    own cache; any other link, and whatever is neither a file nor a folder, is strange.
    """
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    files: dict[str, int] = {}
    strange: list[str] = []
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        if name == ".gitattributes" or name.startswith(_ASIDE):
            continue
        try:
            status = path.stat()
            inside = any(path.resolve().is_relative_to(place) for place in roots)
        except (OSError, RuntimeError):  # a link to nothing, or to itself
            strange.append(f"{name} leads nowhere")
            continue
        if not inside:
            strange.append(f"{name} is a link out of the folder")
        elif stat.S_ISREG(status.st_mode):
            files[name] = status.st_size
        else:
            strange.append(f"{name} is {'a link to a folder' if path.is_dir() else 'neither a file nor a folder'}")
    return Listing(dict(sorted(files.items())), tuple(strange))


def _walk(root: Path) -> Iterator[Path]:
    """Everything below a folder but the folders themselves; links to folders are not followed."""
    for at, folders, names in os.walk(root, followlinks=False, onerror=_unread):
        for name in (*names, *(name for name in folders if (Path(at) / name).is_symlink())):
            yield Path(at) / name


def _unread(error: OSError) -> NoReturn:
    """A folder that cannot be listed may hold anything."""
    raise UnreadableError(f"{error.filename} cannot be listed: {error.strerror}")


@dataclass(frozen=True, slots=True)
class ExpectedName:
    """The name of the release that a person asked for: a recipe's, or with ``repository`` the Hub's org/name."""

    name: str
    repository: bool = False


@dataclass(frozen=True)
class ReleaseUnderTest:
    """What the checks look at.

    ``digests`` are the SHA-256 of all files by name. ``tag`` and ``wanted`` are tag and name of the release that a
    person asked for.
    """

    folder: Path
    listing: Listing
    digests: Mapping[str, str]
    manifest: Manifest
    progress: Progress
    tag: str | None = None
    wanted: ExpectedName | None = None

    def text(self, name: str, *, largest: int = LARGEST) -> str:
        """A file as UTF-8 text; `UnreadableError` where it is none, is not there, or is too large."""
        try:
            return self._bytes(name, largest).decode()
        except UnicodeDecodeError as error:
            raise UnreadableError(f"{name} is not UTF-8 at byte {error.start}") from None

    def object(self, name: str, *, largest: int = LARGEST) -> dict[str, Any]:
        """A file as one JSON object."""
        raw = self._bytes(name, largest)
        try:
            return strict_object(raw)
        except ValueError as error:
            raise UnreadableError(f"{name} is not JSON: {error}") from None

    def _bytes(self, name: str, largest: int) -> bytes:
        if name not in self.listing.files:
            raise UnreadableError(f"{name} is not there")
        if self.listing.files[name] > largest:
            raise UnreadableError(f"{name} is larger than {largest:,} bytes")
        return (self.folder / name).read_bytes()

    @property
    def artefact(self) -> str:
        """The digest of the checkpoint as it lies here: what the verdict is about.

        The checkpoint is what lies at the top, and named chat templates, but for card, manifest and signature.
        """
        files = {
            name: (size, self.digests[name])
            for name, size in self.listing.files.items()
            if ("/" not in name or name.startswith(f"{NAMED_TEMPLATES}/")) and name not in (CARD, *UNLISTED)
        }
        return folder_digest(files)

    @cached_property
    def record(self) -> tuple[Measurements, GateReport, GateReport]:
        """The gate's measurements, its recorded judgement, and that of the numbers now. Raises `UnreadableError`."""
        name = f"{EVIDENCE}/{gate_record.NAME}"
        self.object(name)  # no key twice
        try:
            measurements, recorded = gate_record.read(self.folder / name)
            return measurements, recorded, judge(measurements, recorded.policy)
        except MeasurementError as error:
            raise UnreadableError(str(error)) from None
