"""Files that go from one place to another: plain names, digests held against the bytes as they go by, no halves."""

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
"""Called with the bytes that are done since the last call."""
Pieces = Callable[[str, int], Iterator[bytes]]
"""The bytes of a file from an offset on."""
Wanted = Callable[[str], bool] | None
"""Whether a file is needed, by its name (None: all are)."""
PARTIAL: Final = ".partial"
"""What is put behind a file's name while it comes in."""
_CHUNK: Final = 1 << 22  # bytes
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')  # what a file system refuses or reads otherwise


@dataclass(frozen=True, slots=True)
class File:
    """A file: where it lies now, its bytes and its SHA-256 in hex."""

    path: Path
    size: int
    sha256: str


class DamagedError(StageError):
    """A place answers, and what lies there is not what was put there."""


class OtherBytesError(DamagedError):
    """A place holds other bytes under a file's name than it should."""


def require_safe(names: Iterable[str]) -> None:
    """Raise `ValueError` for the first name that is no plain relative path, or that another one would overwrite.

    What lies in a folder on one machine is put into one on another: a name that climbs out, that a file system reads
    otherwise, or that differs from another's in case alone or in how Unicode writes an accent, is an attack or an
    accident.
    """
    seen: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if _FORBIDDEN.search(name) or any(part in {"", ".", ".."} or part.endswith((" ", ".")) for part in parts):
            raise ValueError(f"found the file name {name!r}, expected a relative path without '..'")
        if len(name.encode()) > 1024 or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"found the file name {name[:40]!r}..., which is too long for a file system")
        # Unicode 3.13, canonical caseless matching: what some file system takes for one.
        folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
        other = seen.setdefault(folded, name)
        if other != name:
            raise ValueError(f"found the file names {other!r} and {name!r}, which are one on some file systems")
    for name in seen:
        for end in (at for at, character in enumerate(name) if character == "/"):
            if name[:end] in seen:
                raise ValueError(f"found {seen[name[:end]]!r} as a file and as a folder of {seen[name]!r}")


def chunks(path: Path, *, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in pieces."""
    with path.open("rb") as reader:
        reader.seek(start)
        while chunk := reader.read(_CHUNK):
            yield chunk


def digest_of(path: Path, advance: Advance) -> str:
    """SHA-256 in hex of a file that may be large."""
    found = hashlib.sha256()
    for chunk in chunks(path):
        found.update(chunk)
        advance(len(chunk))
    return found.hexdigest()


def judged(file: File) -> Iterator[bytes]:
    """The bytes of a file in pieces; raises `StageError` at their end where they are not those of its digest."""
    found = hashlib.sha256()
    for chunk in chunks(file.path):
        found.update(chunk)
        yield chunk
    require_digest(file, found.hexdigest())


def require_digest(file: File, sha256: str) -> None:
    """Raise `StageError` where a file changed after its digest was taken."""
    if sha256 != file.sha256:
        raise StageError(
            f"{file.path} is not what was judged: its SHA-256 is {sha256[:16]}…, expected {file.sha256[:16]}…",
            hint="Nothing was published. Run `quantmint run --redo quantize` to make the checkpoint again.",
        )


def copy(file: File, destination: Path, advance: Advance) -> None:
    """Write a new file with the bytes of another one, on the disk when this returns.

    Every byte is read and written: a file that shares its blocks with the store would share a later edit's fate where
    the link is a hard one, and the digest asks for a reading anyhow. Raises `StageError` for other bytes than those of
    its digest, and `OSError`.
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
    wanted: Wanted = None,
) -> Path:
    """Make ``into`` a folder with these files, or those of them that are wanted, in their order; returns it.

    ``sizes`` are in bytes; ``digests`` holds the SHA-256 of those files whose digest is known. A file that is there
    whole stays; of one that was cut off only the rest is brought. Raises `UserError` where ``into`` holds other files
    or a name leads out of it, and `StageError` for other bytes, which do not stay.
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
        names = [name for name in sizes if wanted is None or wanted(name)]
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
    found = hashlib.sha256()
    start = partial.stat().st_size if digest is not None and partial.is_file() else 0
    if 0 < start <= size:
        for chunk in chunks(partial):
            found.update(chunk)
    else:
        partial.unlink(missing_ok=True)
        start = 0
    advance(start)
    with partial.open("ab") as writer:
        for chunk in pieces(name, start) if start < size else ():
            found.update(chunk)
            writer.write(chunk)
            advance(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    brought = partial.stat().st_size
    if brought < size:
        raise StageError(f"{place}: {name} ended after {brought:,} of {size:,} bytes", hint="Run it again to go on.")
    if brought != size or (digest is not None and found.hexdigest() != digest):
        partial.unlink()
        raise OtherBytesError(
            f"{place}: {name} is not what the release says: its SHA-256 is {found.hexdigest()[:16]}…, "
            f"expected {(digest or '')[:16]}…",
            hint="It was not kept. Where it happens again, the place holds other bytes than were published.",
        )
    partial.replace(path)
