"""Objects of any file system that fsspec reaches: gs://, az://, oss://, file://, memory:// and others.

No digests are known there, so what was sent is read back; and no conditions, so that two publishers exclude each other
only as far as the second looks after the first has written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import StageError, UserError
from pipeline.publish.copying import Advance, changed, chunks
from pipeline.publish.release import File
from pipeline.publish.storage.objects import Content, require_small
from pipeline.transience import is_transient

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_CHUNK: Final = 1 << 22  # bytes
_PARTIAL: Final = ".partial"


class FileSystemObjects:
    """Objects below a URL; see `pipeline.publish.storage.objects.Objects`."""

    def __init__(self, url: str) -> None:
        self._place = url

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        from fsspec.core import url_to_fs

        try:
            filesystem, root = url_to_fs(self._place, use_listings_cache=False)
        except ImportError as error:
            raise UserError(f"{self._place}: {error}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{self._place}: fsspec does not open it: {error}") from None
        return filesystem, root.rstrip("/")

    @property
    def insecure(self) -> str | None:
        """Only plain connections of fsspec's own kinds would be; http itself cannot be written."""
        return None

    def require_writable(self, sizes: Mapping[str, int]) -> None:
        """Whether it can be listed; what may be written cannot be asked of every file system."""
        with self._told("list"):
            filesystem, root = self._opened
            filesystem.invalidate_cache()
            filesystem.exists(root)

    def names(self) -> tuple[str, ...]:
        """Names of the files that lie directly here."""
        return tuple(name for name in self._below("", depth=1) if not name.endswith(_PARTIAL))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files below a folder, by their names in it."""
        return self._below(folder, depth=None)

    def holds(self, name: str, file: File) -> bool:
        """By its size, and by its digest when it is read back."""
        with self._told(f"read {name}"):
            filesystem, _ = self._opened
            path = self._path(name)
            if not filesystem.exists(path) or filesystem.size(path) != file.size:
                return False
            found = hashlib.sha256()
            for piece in self.pieces(name, 0, file.size):
                found.update(piece)
            return found.hexdigest() == file.sha256

    def send(self, name: str, file: File, advance: Advance) -> None:
        """Write the bytes while they are hashed, and read them back."""
        found = hashlib.sha256()
        with self._told(f"write {name}"):
            with self._writing(self._path(name)) as writer:
                for chunk in chunks(file.path):
                    found.update(chunk)
                    writer.write(chunk)
                    advance(len(chunk))
            if found.hexdigest() != file.sha256:
                self.drop(name)
                raise changed(file.path, found.hexdigest(), file.sha256)
            if not self.holds(name, file):
                self.drop(name)
                raise StageError(f"{self._place}: {name} is not there what was written", hint="It was removed.")

    def read(self, name: str) -> Content | None:
        """A small file whole; its mark is the digest of its bytes."""
        with self._told(f"read {name}"):
            filesystem, _ = self._opened
            try:
                require_small(self._place, name, int(filesystem.size(self._path(name)) or 0))
                data = bytes(filesystem.cat_file(self._path(name)))
            except FileNotFoundError:
                return None
            return Content(data, hashlib.sha256(data).hexdigest())

    def replace(self, name: str, data: bytes, seen: str | None) -> bool:
        """Write under another name, then rename."""
        with self._told(f"write {name}"):
            filesystem, _ = self._opened
            partial = self._path(f"{name}{_PARTIAL}")
            with self._writing(partial) as writer:
                writer.write(data)
            filesystem.mv(partial, self._path(name))
        return True

    def pieces(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """The bytes of a file from ``start`` on."""
        with self._told(f"read {name}"):
            filesystem, _ = self._opened
            with filesystem.open(self._path(name), "rb") as reader:
                reader.seek(start)
                while chunk := reader.read(_CHUNK):
                    yield chunk

    def drop(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with self._told(f"remove {name}"), suppress(FileNotFoundError):
            self._opened[0].rm_file(self._path(name))

    def clear(self, folder: str) -> None:
        """Remove a folder with everything in it."""
        with self._told(f"remove {folder}"), suppress(FileNotFoundError):
            self._opened[0].rm(self._path(folder), recursive=True)

    def tidy(self, folder: str) -> None:
        """Nothing: a half has the name of the whole and is written anew."""

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}"

    def _below(self, folder: str, depth: int | None) -> dict[str, int]:
        with self._told("list"):
            filesystem, _ = self._opened
            filesystem.invalidate_cache()
            root = self._path(folder).rstrip("/")
            try:
                found = filesystem.find(root, maxdepth=depth, detail=True)
            except FileNotFoundError:
                return {}
            return {path.removeprefix(root).lstrip("/"): int(fact["size"]) for path, fact in found.items()}

    @contextmanager
    def _writing(self, path: str) -> Iterator[Any]:
        filesystem, _ = self._opened
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        with filesystem.open(path, "wb") as writer:
            yield writer

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except NotImplementedError:
            raise UserError(f"{self._place}: fsspec cannot {doing} there") from None
        except PermissionError as error:
            raise UserError(f"{self._place}: no right to {doing}: {error}") from error
        except OSError as error:
            raise StageError(
                f"{self._place}: could not {doing}: {error or type(error).__name__}",
                hint="Run the same command again: what was sent is kept.",
                transient=is_transient(error),
            ) from error
