"""Files held against their digests while their bytes go by, and put on the disk before they are believed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pipeline.errors import StageError

Advance = Callable[[int], None]
"""Called with the bytes that are done since the last call."""
_CHUNK: Final = 1 << 22  # bytes


def copy(source: Path, destination: Path, digest: str | None, advance: Advance) -> None:
    """Write a new file with the bytes of ``source``, whose SHA-256 must be ``digest`` (None: unknown).

    Every byte is read and written: a file that shares its blocks with the store would share a later edit's fate where
    the link is a hard one, and the digest asks for a reading anyhow. Raises `StageError` for other bytes than those,
    and `OSError`.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with destination.open("xb", buffering=0) as writer:
        for chunk in chunks(source):
            found.update(chunk)
            view = memoryview(chunk)
            while view.nbytes:
                view = view[writer.write(view) :]
            advance(len(chunk))
        os.fsync(writer.fileno())
    if digest is not None and found.hexdigest() != digest:
        raise changed(source, found.hexdigest(), digest)


def digest_of(path: Path, advance: Advance) -> str:
    """SHA-256 in hex of a file that may be large."""
    found = hashlib.sha256()
    for chunk in chunks(path):
        found.update(chunk)
        advance(len(chunk))
    return found.hexdigest()


def chunks(path: Path, *, start: int = 0, size: int = _CHUNK) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in pieces of ``size`` bytes, the last one shorter."""
    with path.open("rb") as reader:
        reader.seek(start)
        while chunk := reader.read(size):
            yield chunk


def changed(source: Path, found: str, expected: str) -> StageError:
    """The refusal of a file that is not what its release says."""
    return StageError(
        f"{source} is not what was judged: its SHA-256 is {found[:16]}…, expected {expected[:16]}…",
        hint="Nothing was published. Run `quantmint run --redo quantize` to make the checkpoint again.",
    )
