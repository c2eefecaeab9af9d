"""The release under test, and the result of a check.

The files of a release are untrusted: duplicate JSON keys and links out of the folder are faults, and no code is run.
Values that several checks need are computed once.
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
"""Largest text in bytes that is read; parsed it takes about twenty times as much memory."""
UNSIGNED: Final = "CONSISTENT, UNSIGNED"
"""Conclusion about an unsigned release without contradictions."""
_ASIDE = (".git/", ".cache/huggingface/")
"""Files of git and the Hub's client, which are no part of a release and which no server reads."""


class CheckOutcome(Enum):
    """The outcome of a check. A check that could not be made is never OK."""

    OK = "OK"
    FAILS = "FAILS"
    NOT_CHECKED = "NOT CHECKED"


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """The result of one check: a sentence as ``reason``, further ones as ``details``; both may quote untrusted text.

    ``vouched`` is False when the signature's check is OK only because the reader accepts an unsigned release.
    """

    name: str
    outcome: CheckOutcome
    reason: str
    details: tuple[str, ...] = ()
    vouched: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "outcome": self.outcome.value, "details": list(self.details)}


def conclude(name: str, faults: Sequence[str], holds: str) -> ReleaseCheck:
    """Return FAILS with the first fault as reason and the others as details, or OK with ``holds`` as reason."""
    if faults:
        return ReleaseCheck(name, CheckOutcome.FAILS, faults[0], tuple(faults[1:]))
    return ReleaseCheck(name, CheckOutcome.OK, holds)


def failure(name: str, reason: str, *details: str) -> ReleaseCheck:
    """Return FAILS with a reason."""
    return ReleaseCheck(name, CheckOutcome.FAILS, reason, details)


def not_checked(name: str, reason: str, *details: str) -> ReleaseCheck:
    """Return NOT CHECKED with a reason."""
    return ReleaseCheck(name, CheckOutcome.NOT_CHECKED, reason, details)


def first_five(faults: Sequence[str], what: str) -> list[str]:
    """Return the first five faults, and a line with the number of the others."""
    suffix = [f"{len(faults) - 5} more {what}"] if len(faults) > 5 else []
    return [*faults[:5], *suffix]


def exit_code(checks: Sequence[ReleaseCheck]) -> int:
    """Return 1 if a check fails, else 3 if a check could not be made, else 0."""
    outcomes = {check.outcome for check in checks}
    return 1 if CheckOutcome.FAILS in outcomes else 3 if CheckOutcome.NOT_CHECKED in outcomes else 0


def conclusion(checks: Sequence[ReleaseCheck]) -> str:
    """Return VERIFIED, FAILS or NOT ALL CHECKED; CONSISTENT, UNSIGNED if all checks of an unsigned release are OK."""
    code = exit_code(checks)
    if code == 0 and not all(check.vouched for check in checks):
        return UNSIGNED
    return {0: "VERIFIED", 1: "FAILS", 3: "NOT ALL CHECKED"}[code]


class UnreadableError(UserError):
    """A file that is absent, too large, or not of its name's kind; the message names it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a folder: sizes in bytes of regular files by name, and a sentence for anything else."""

    files: dict[str, int]
    strange: tuple[str, ...]


def listing(folder: Path) -> Listing:
    """List the files below a folder without opening one, but for `.gitattributes` and what a publisher sets aside.

    A symbolic link counts as its target if that is a file in the folder or among the blobs of the Hub's cache. Other
    links, and everything else that is neither file nor folder, are ``strange``.
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
    """Yield everything below a folder but the folders; links to folders are yielded, not followed."""
    for at, folders, names in os.walk(root, followlinks=False, onerror=_unread):
        for name in (*names, *(name for name in folders if (Path(at) / name).is_symlink())):
            yield Path(at) / name


def _unread(error: OSError) -> NoReturn:
    """Raise `UnreadableError` for a folder that cannot be listed and so may hold anything."""
    raise UnreadableError(f"{error.filename} cannot be listed: {error.strerror}")


@dataclass(frozen=True, slots=True)
class ExpectedName:
    """The name of the release that the reader expects: a recipe's, or with ``repository`` the Hub's org/name."""

    name: str
    repository: bool = False


@dataclass(frozen=True)
class ReleaseUnderTest:
    """A release with its files, as the checks read it.

    ``digests`` are the SHA-256 of all files by name. ``tag`` and ``expected`` are the tag and name that the reader
    expects.
    """

    folder: Path
    listing: Listing
    digests: Mapping[str, str]
    manifest: Manifest
    progress: Progress
    tag: str | None = None
    expected: ExpectedName | None = None

    def text(self, name: str, *, largest: int = LARGEST) -> str:
        """Return a file as UTF-8 text; raise `UnreadableError` if it is none, absent, or too large."""
        try:
            return self._bytes(name, largest).decode()
        except UnicodeDecodeError as error:
            raise UnreadableError(f"{name} is not UTF-8 at byte {error.start}") from None

    def object(self, name: str, *, largest: int = LARGEST) -> dict[str, Any]:
        """Return a file as one JSON object; raise `UnreadableError` if it is none, absent, or too large."""
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
        """Return the digest of the checkpoint's files in this folder, for comparison with the gate's.

        The checkpoint is all files at the top but card, manifest and signature, and the named chat templates.
        """
        files = {
            name: (size, self.digests[name])
            for name, size in self.listing.files.items()
            if ("/" not in name or name.startswith(f"{NAMED_TEMPLATES}/")) and name not in (CARD, *UNLISTED)
        }
        return folder_digest(files)

    @cached_property
    def record(self) -> tuple[Measurements, GateReport, GateReport]:
        """Return the gate's measurements, its recorded judgement, and a new judgement. Raises `UnreadableError`."""
        name = f"{EVIDENCE}/{gate_record.NAME}"
        self.object(name)  # no key twice
        try:
            measurements, recorded = gate_record.read(self.folder / name)
            return measurements, recorded, judge(measurements, recorded.policy)
        except MeasurementError as error:
            raise UnreadableError(str(error)) from None
