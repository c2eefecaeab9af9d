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
    """Yield the name to write a file under; after the block, flush the file to the disk and move it to ``path``.

    ``temporary`` is the name that is yielded (None: a new one beside ``path`` that ends with ".partial"); it must lie
    on the same filesystem. Where the block fails or is interrupted, the temporary file is removed. Raises `OSError`.
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
    """Remove the partial files that killed processes left in a folder. Raises `OSError`.

    No other process may write into the folder meanwhile.
    """
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink()


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
