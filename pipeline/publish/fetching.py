"""A release brought into a folder: every digest is checked, and what is there already is not brought again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pipeline.errors import StageError, UserError
from pipeline.progress import Progress
from pipeline.publish.copying import Advance, chunks, digest_of
from pipeline.publish.names import require_safe
from pipeline.publish.release import MANIFEST
from pipeline.publish.wholeness import DamagedError
from pipeline.store.disk import disk_errors, fsync

Pieces = Callable[[str, int], Iterator[bytes]]
"""The bytes of a file from an offset on."""
PARTIAL: Final = ".partial"
"""What is put behind a file's name while it comes in."""


class OtherBytesError(DamagedError):
    """A place holds other bytes under a file's name than its release has."""


def fetch(
    into: Path,
    sizes: Mapping[str, int],
    digests: Mapping[str, str],
    pieces: Pieces,
    *,
    place: str,
    progress: Progress,
    wanted: Callable[[str], bool] | None = None,
) -> Path:
    """Make ``into`` a folder with these files, or those of them that are wanted; returns it.

    ``sizes`` are in bytes; ``digests`` holds the SHA-256 of those files whose digest is known, which are all but the
    signature. A file that is there whole stays; of one that was cut off only the rest is brought; ``quantmint.json``
    comes last. Raises `UserError` where ``into`` holds other files or a name leads out of it, and `StageError` for
    bytes that are not those of the release, which do not stay.
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
            for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
                _bring(name, into / name, sizes[name], digests.get(name), pieces, place, advance)
        for folder in {into, *((into / name).parent for name in names)}:
            fsync(folder)
    return into


def _bring(name: str, path: Path, size: int, digest: str | None, pieces: Pieces, place: str, advance: Advance) -> None:
    if digest is not None and path.is_file() and path.stat().st_size == size and digest_of(path, _none) == digest:
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


def _none(_: int) -> None:
    """No progress: what is read again was counted as a whole."""
