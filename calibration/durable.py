"""What is to be on the disk for good."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
