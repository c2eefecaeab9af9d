"""The release under test, read as what a stranger wrote.

No more bytes than expected, no key twice, nothing that lies elsewhere, no code that is run; and what several checks
need is worked out once.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from eval import record as gate_record
from eval.gate import judge
from pipeline.base.errors import UserError
from pipeline.publish.release import CARD, EVIDENCE, UNLISTED
from pipeline.quantize.digest import NAMED_TEMPLATES, folder_digest
from pipeline.quantize.formats.checkpoint import INDEX_NAME, open_checkpoint

if TYPE_CHECKING:
    from eval.gate import GateReport
    from eval.measurements import Measurements
    from pipeline.base.progress import Progress
    from pipeline.publish.manifest import Manifest
    from pipeline.quantize.formats.checkpoint import Checkpoint
    from pipeline.quantize.model.structure import Structure


UNPACKED: Final = 1 << 29
"""Bytes that all samples together may unpack to; MMLU takes four million a side."""
_HEADERS = 1 << 27  # bytes of all headers; those of DeepSeek-R1 in FP8 take twelve million
_COUNTS = ("layers", "experts")
_MODULES = 10_000  # that a model may have beside eight for each tensor; of a Llama every second one has a weight

LARGEST: Final = 1 << 25
"""Bytes of a text that is read whole. Parsed, they take about twenty times as much memory."""
_MOST_FILES = 100_000
_ASIDE = (".git/", ".cache/huggingface/")
"""What the Hub and its clients put beside a release: no part of it, and read by nothing that serves it."""


class UnreadableError(ValueError):
    """A file is not there, too large, or not what its name says; the message names it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a folder: sizes in bytes of regular files by name, what else there is, what clients left."""

    files: dict[str, int]
    strange: tuple[str, ...]
    aside: tuple[str, ...]


def listing(folder: Path) -> Listing:
    """Look at every name below a folder without opening one.

    A symbolic link counts as the file that it leads to where that lies in the folder, or among the blobs of the Hub's
    own cache; any other link, and whatever is neither a file nor a folder, is strange.
    """
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    files: dict[str, int] = {}
    strange: list[str] = []
    aside: list[str] = []
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        if name == ".gitattributes" or name.startswith(_ASIDE):
            aside.append(name)
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
    return Listing(dict(sorted(files.items())), tuple(strange), tuple(aside))


def _walk(root: Path) -> Iterator[Path]:
    """Everything below a folder but the folders themselves; links to folders are not followed."""
    seen = 0
    for at, folders, names in os.walk(root, followlinks=False, onerror=_unread):
        for name in (*names, *(name for name in folders if (Path(at) / name).is_symlink())):
            seen += 1
            if seen > _MOST_FILES:
                raise UnreadableError(f"more than {_MOST_FILES:,} files, which no release has")
            yield Path(at) / name


def _unread(error: OSError) -> NoReturn:
    """A folder that cannot be listed may hold anything."""
    raise UnreadableError(f"{error.filename} cannot be listed: {error.strerror}")


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """The bytes of a file; `UnreadableError` where it is not there or larger."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(largest + 1)
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(raw) > largest:
        raise UnreadableError(f"{path.name} is larger than {largest:,} bytes")
    return raw


def read_text(path: Path, *, largest: int = LARGEST) -> str:
    """A file as UTF-8 text."""
    try:
        return read_bytes(path, largest=largest).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path.name} is not UTF-8 at byte {error.start}") from None


def read_object(path: Path, *, largest: int = LARGEST) -> dict[str, Any]:
    """A file as one JSON object: of a key that is there twice, readers take different ones, so it is refused."""
    try:
        data = json.loads(read_bytes(path, largest=largest), object_pairs_hook=_once, parse_constant=_no_number)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UnreadableError(f"{path.name} holds no JSON object")
    return data


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


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
        """The gate's measurements, its recorded judgement, and the one that follows from the numbers now.

        Raises `UnreadableError`, or `eval.errors.MeasurementError` for what is no record.
        """
        return _record(self)

    @cached_property
    def model(self) -> tuple[Checkpoint, Structure]:
        """The checkpoint by its headers and the modules of its configuration."""
        return _model(self)


def _record(subject: Subject) -> tuple[Measurements, GateReport, GateReport]:
    """The measurements, the recorded judgement, and the judgement that the numbers lead to now.

    Raises `UnreadableError`, or `eval.errors.MeasurementError` for what is no record of the gate.
    """
    name = subject.evidence(gate_record.NAME)
    try:
        named = list(_named(subject.object(name)))  # bounded, and no key twice
    except (AttributeError, KeyError, TypeError):
        named = []  # it is no record, which the reader says
    room = UNPACKED
    for sample in named:
        if not subject.has(subject.evidence(sample)):
            continue  # the reader says of what it reads that it is missing, or lies elsewhere
        room -= _unpacked(subject.folder / subject.evidence(sample), room)
    measurements, recorded = gate_record.read(subject.folder / name)
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
                    raise UnreadableError(f"the samples unpack to more than {UNPACKED:,} bytes")
    except (EOFError, OSError, zlib.error) as error:
        raise UnreadableError(f"{path.name} cannot be unpacked: {error}") from None
    return total


class _EndlessError(Exception):
    """A configuration asks for more modules than the checkpoint could fill."""


class UnknownModelError(UserError):
    """What is installed here cannot build the model: nothing is said of the checkpoint."""


def _model(subject: Subject) -> tuple[Checkpoint, Structure]:
    """Open the checkpoint and build its model without weights; code of the repository is never run.

    Raises `UserError` for a checkpoint that contradicts itself, and `UnknownModelError` where the model cannot be
    built here.
    """
    from pipeline.quantize.model.meta import meta_model
    from pipeline.quantize.model.structure import read_structure

    config = subject.object("config.json")
    _bound(subject, config)
    checkpoint = open_checkpoint(subject.folder)
    for name, count in _counts(config):
        if count > max(len(checkpoint.tensors), 1):
            raise UserError(
                f"config.json says {name} {count:,}, the checkpoint has {len(checkpoint.tensors):,} tensors in all"
            )
    most = _MODULES + 8 * len(checkpoint.tensors)
    try:
        with _at_most(most):
            return checkpoint, read_structure(subject.folder, checkpoint.tensors)
    except _EndlessError:
        raise UserError(
            f"config.json asks for more than {most:,} modules, the checkpoint has {len(checkpoint.tensors):,} tensors "
            "in all"
        ) from None
    except UserError:
        try:
            meta_model(subject.folder)
        except UserError as error:
            raise UnknownModelError(error.message) from None
        raise


@contextmanager
def _at_most(most: int) -> Iterator[None]:
    """Stop building after so many modules: configurations count them by more names than anybody knows."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise _EndlessError

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _bound(subject: Subject, config: Mapping[str, Any]) -> None:
    """Refuse what would be read without end before it is parsed."""
    if subject.listing.files.get(INDEX_NAME, 0) > LARGEST:
        raise UnreadableError(f"{INDEX_NAME} is larger than {LARGEST:,} bytes")
    total = 0
    for name in subject.listing.files:
        if name.endswith(".safetensors"):
            with (subject.folder / name).open("rb") as stream:
                head = stream.read(8)
            total += struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if total > _HEADERS:
            raise UnreadableError(f"the headers of the safetensors files take more than {_HEADERS:,} bytes")


def _counts(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Numbers of layers and experts anywhere in a configuration: a model is built with as many modules."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _counts(entry, str(key))
    elif isinstance(value, int) and any(word in name for word in _COUNTS):
        yield name, value
