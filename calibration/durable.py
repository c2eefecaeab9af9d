"""Files that are there whole or not at all, and stay through a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PARTIAL: Final = ".partial"
"""How names of files end that are not whole yet."""


@contextmanager
def whole(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield the name to write a file under; move it to ``path`` after the block, on the disk for good.

    ``temporary`` is that name (None: a new one beside ``path`` that ends with ".partial"), on the same filesystem.
    Whatever fails in the block or here, an interrupt as well, removes the file again. Raises `OSError`.
    """
    partial = temporary or path.with_suffix(f".{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def sweep(folder: Path) -> None:
    """Remove what killed processes left in `whole`; nobody else may write there meanwhile. Raises `OSError`."""
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink()


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
