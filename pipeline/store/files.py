"""Copy and download files: safe relative names, digests checked while the bytes pass, no incomplete file left under a
final name.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quantmint.calibration.durable import fsync
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.store.disk import disk_errors

if TYPE_CHECKING:
    from quantmint.pipeline.base.progress import Progress

Advance = Callable[[int], None]
"""Called with the number of bytes done since the last call."""
Pieces = Callable[[str, int], Iterator[bytes]]
"""Function of a file's name and an offset: yields its bytes from there on."""
Selection = Callable[[str], bool] | None
"""Whether to take a file, by its name (None: take all)."""
PARTIAL: Final = ".partial"
"""Suffix of a file that is being downloaded."""
_CHUNK: Final = 1 << 22  # bytes
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')  # what a file system refuses or reads otherwise


@dataclass(frozen=True, slots=True)
class File:
    """A local file: its path, its size in bytes and its SHA-256 in hex."""

    path: Path
    size: int
    sha256: str


class DamagedError(StageError):
    """A destination answers, but its files are not those that were put there."""


class OtherBytesError(DamagedError):
    """A file at a destination has other bytes than its digest says."""


def require_safe(names: Iterable[str]) -> None:
    """Raise `ValueError` for the first name that is not a plain relative path, or that collides with another name.

    The names come from another machine and become files on this one. A name that leaves its folder, that a file system
    reads differently, or that differs from another one only in case or in the Unicode form of an accent is an attack or
    an accident.
    """
    by_folded: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if _FORBIDDEN.search(name) or any(part in {"", ".", ".."} or part.endswith((" ", ".")) for part in parts):
            raise ValueError(f"found the file name {name!r}, expected a relative path without '..'")
        if len(name.encode()) > 1024 or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"found the file name {name[:40]!r}..., which is too long for a file system")
        # Unicode 3.13, canonical caseless matching: what some file system takes for one.
        folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
        first = by_folded.setdefault(folded, name)
        if first != name:
            raise ValueError(f"found the file names {first!r} and {name!r}, which are one on some file systems")
    for name in by_folded:
        for end in (at for at, character in enumerate(name) if character == "/"):
            if name[:end] in by_folded:
                raise ValueError(f"found {by_folded[name[:end]]!r} as a file and as a folder of {by_folded[name]!r}")


def chunks(path: Path, *, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from ``start`` on, in pieces of 4 MiB at most."""
    with path.open("rb") as reader:
        reader.seek(start)
        while chunk := reader.read(_CHUNK):
            yield chunk


def digest_of(path: Path, advance: Advance) -> str:
    """Return the SHA-256 of a file in hex; ``advance`` is called with the bytes of each piece."""
    hasher = hashlib.sha256()
    for chunk in chunks(path):
        hasher.update(chunk)
        advance(len(chunk))
    return hasher.hexdigest()


def judged(file: File) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces.

    After the last piece, raises `StageError` if the bytes do not have the file's digest.
    """
    hasher = hashlib.sha256()
    for chunk in chunks(file.path):
        hasher.update(chunk)
        yield chunk
    require_digest(file, hasher.hexdigest())


def require_digest(file: File, sha256: str) -> None:
    """Raise `StageError` where a file changed after its digest was taken."""
    if sha256 != file.sha256:
        raise StageError(
            f"{file.path} is not what was judged: its SHA-256 is {sha256[:16]}…, expected {file.sha256[:16]}…",
            hint="Nothing was published. Run `quantmint run --redo quantize` to make the checkpoint again.",
        )


def copy(file: File, destination: Path, advance: Advance) -> None:
    """Write a new file with the bytes of another one; the bytes are on the disk when this returns.

    The bytes are copied, not linked: a hard link would share later edits with the store, and checking the digest reads
    them anyway. Raises `StageError` for bytes that do not have the file's digest, and `OSError`.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with destination.open("xb", buffering=0) as writer:
        for chunk in judged(file):
            view = memoryview(chunk)
            while view.nbytes:
                view = view[writer.write(view) :]
            advance(len(chunk))
        os.fsync(writer.fileno())


def fetch(
    into: Path,
    sizes: Mapping[str, int],
    digests: Mapping[str, str],
    pieces: Pieces,
    *,
    place: str,
    progress: Progress,
    select: Selection = None,
) -> Path:
    """Download the selected files into the folder ``into``, in the order of ``sizes``; return the folder.

    ``sizes`` are in bytes; ``digests`` holds SHA-256 in hex, where known; ``select`` says by name which files to take
    (None: all). A complete file with the right digest is not downloaded again, and an interrupted download continues.
    Raises `UserError` if ``into`` holds other files or a name leads out of it, and `StageError` for wrong bytes, which
    are deleted.
    """
    try:
        require_safe(sizes)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    with disk_errors(into, needed=sum(sizes.values())):
        into.mkdir(parents=True, exist_ok=True)
        present = {path.relative_to(into).as_posix() for path in into.rglob("*") if not path.is_dir()}
        strays = sorted(present - sizes.keys() - {f"{name}{PARTIAL}" for name in sizes})
        if strays:
            raise UserError(
                f"{into}: found {strays[0]}, which is no file of the release", hint="Name a folder that is not there."
            )
        names = [name for name in sizes if select is None or select(name)]
        with progress.bar(sum(sizes[name] for name in names), "B") as advance:
            for name in names:
                _bring(name, into / name, sizes[name], digests.get(name), pieces, place, advance)
        for folder in {into, *((into / name).parent for name in names)}:
            fsync(folder)
    return into


def _bring(name: str, path: Path, size: int, digest: str | None, pieces: Pieces, place: str, advance: Advance) -> None:
    there = digest is not None and path.is_file() and path.stat().st_size == size
    if there and digest_of(path, lambda _: None) == digest:
        advance(size)
        return
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    hasher = hashlib.sha256()
    start = partial.stat().st_size if digest is not None and partial.is_file() else 0
    if 0 < start <= size:
        for chunk in chunks(partial):
            hasher.update(chunk)
    else:
        partial.unlink(missing_ok=True)
        start = 0
    advance(start)
    with partial.open("ab") as writer:
        for chunk in pieces(name, start) if start < size else ():
            hasher.update(chunk)
            writer.write(chunk)
            advance(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    brought = partial.stat().st_size
    if brought < size:
        raise StageError(f"{place}: {name} ended after {brought:,} of {size:,} bytes", hint="Run it again to go on.")
    if brought != size or (digest is not None and hasher.hexdigest() != digest):
        partial.unlink()
        raise OtherBytesError(
            f"{place}: {name} is not what the release says: its SHA-256 is {hasher.hexdigest()[:16]}…, "
            f"expected {(digest or '')[:16]}…",
            hint="It was not kept. Where it happens again, the place holds other bytes than were published.",
        )
    partial.replace(path)
