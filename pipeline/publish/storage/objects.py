"""What is asked of a place that holds objects by name; and which of the two answers, S3 or a file system of fsspec.

S3 has conditions, checksums and uploads in parts, so it is spoken to by its own operations, through s3fs; everything
else by fsspec's common ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.errors import StageError, UserError
from pipeline.publish.copying import Advance
from pipeline.publish.release import File

_S3 = ("s3", "s3a")
SMALL: Final = 1 << 26
"""Bytes of the largest object that is read whole: a manifest of ten thousand files has two million."""


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a small object; ``mark`` is another one whenever the bytes are others."""

    data: bytes
    mark: str


class Objects(Protocol):
    """Objects below a URL by their names there; errors are `StageError` and `UserError`."""

    @property
    def insecure(self) -> str | None:
        """The address, where what is sent there can be read on the way; None where it cannot."""
        ...

    def require_writable(self, sizes: Mapping[str, int]) -> None:
        """Ask whether objects of these sizes may be written, without leaving one."""
        ...

    def names(self) -> tuple[str, ...]:
        """Names of the objects that lie directly here."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects below a folder, by their names in it."""
        ...

    def holds(self, name: str, file: File) -> bool:
        """Whether an object has the size and the SHA-256 of a file."""
        ...

    def send(self, name: str, file: File, advance: Advance) -> None:
        """Write a file; other bytes than its digest's do not become an object. A half from before is gone on with."""
        ...

    def read(self, name: str) -> Content | None:
        """A small object whole; None where there is none. One that is not `SMALL` is a `StageError`, and not read."""
        ...

    def replace(self, name: str, data: bytes, seen: str | None) -> bool:
        """Write a small object in place of the one that was seen (its mark; None: none was there).

        False, with nothing written, where the place can tell that it is another one now.
        """
        ...

    def pieces(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """The bytes of an object of ``size`` bytes from ``start`` on."""
        ...

    def drop(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...

    def clear(self, folder: str) -> None:
        """Remove everything below a folder, and halves of uploads."""
        ...

    def tidy(self, folder: str) -> None:
        """Remove halves of uploads that nobody will go on with."""
        ...


def require_small(place: str, name: str, size: int) -> None:
    """Raise `StageError` for an object that nobody should hold in memory."""
    if size > SMALL:
        raise StageError(f"{place}: {name} has {size:,} bytes, expected at most {SMALL:,}", hint="Look who wrote it.")


def open_objects(url: str, endpoint: str | None) -> Objects:
    """The objects below a URL. Nothing is asked yet; raises `UserError` for a kind that fsspec does not know."""
    scheme, _, path = url.partition("://")
    if scheme in _S3:
        from pipeline.publish.storage.s3 import S3Objects

        return S3Objects(url, path.strip("/"), endpoint)
    if endpoint is not None:
        raise UserError(f"{url}: found an endpoint, which only s3:// has")
    from pipeline.publish.storage.filesystem import FileSystemObjects

    return FileSystemObjects(url)
