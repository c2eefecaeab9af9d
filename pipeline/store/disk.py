"""Writes that survive a power cut, whose failures say what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quantmint.calibration.durable import whole
from quantmint.pipeline.base.errors import StoreError

# errno -> (what happened, what to do about it)
_FAULTS: Final[dict[int, tuple[str, str]]] = {
    errno.ENOSPC: (
        "the disk is full",
        "make room (`quantmint gc --keep 1` drops old results), then run the same command again",
    ),
    errno.EDQUOT: (
        "the disk quota is used up",
        "raise the quota or drop old results (`quantmint gc --keep 1`), then run again",
    ),
    errno.EFBIG: ("a file may not grow that large", "raise `ulimit -f`, or use a filesystem without that limit"),
    errno.EROFS: ("the filesystem is read-only", "mount it writable, or point the store elsewhere"),
    errno.EACCES: ("permission denied", "give this user write access to the store, or point it elsewhere"),
    errno.EPERM: ("permission denied", "give this user write access to the store, or point it elsewhere"),
}
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError` about ``path``.

    ``needed`` is the number of bytes that the block writes (None: unknown), for the message about a full disk.
    """
    try:
        yield
    except OSError as error:
        raise explain(error, path, needed) from error


def explain(error: OSError, path: Path, needed: int | None = None) -> StoreError:
    """Return the error to raise for an `OSError`, with the path and what to do.

    For a full disk its message has the bytes ``needed`` (None: unknown) and the bytes free.
    """
    what, hint = _FAULTS.get(
        error.errno or 0, (error.strerror or str(error), "look at the disk, then run the same command again")
    )
    place = error.filename if isinstance(error.filename, str) else str(path)
    message = f"{what}: {place}"
    if error.errno in FULL:
        need = "" if needed is None else f"{needed:,} bytes needed, "
        message += f" ({need}{free_bytes(path):,} bytes free)"
    return StoreError(message, hint=hint)


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the filesystem of ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_atomic(path: Path, data: bytes, *, temporary: Path) -> None:
    """Write a file so that readers see all of it or none; ``temporary`` is an unused name on the same filesystem."""
    with whole(path, temporary) as partial:
        partial.write_bytes(data)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular_files(root: Path) -> dict[str, os.stat_result]:
    """Return the status of every file below ``root``, by its relative name with forward slashes, sorted by name.

    Raises `StoreError` for a symbolic link, socket, pipe or device: the store could not hash its target.
    """
    files: dict[str, os.stat_result] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            files[path.relative_to(root).as_posix()] = status
        elif not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{path} is neither a file nor a folder: the store keeps only what it can hash itself")
    return dict(sorted(files.items()))


def folders(root: Path) -> list[Path]:
    """Return ``root`` and every folder below it."""
    return [root, *(path for path in root.rglob("*") if path.is_dir())]
