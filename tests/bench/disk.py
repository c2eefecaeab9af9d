"""What the disk itself takes: random bytes past the page cache, by several threads, and flushed."""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE = 1 << 24


def disk_limit(folder: Path, nbytes: int, threads: int = 4) -> dict[str, Any]:
    """Write about ``nbytes`` into a file a thread, with fsync, and remove them: ``gb``, ``seconds``, ``direct``.

    ``direct`` says whether the file system let the page cache be left out.
    """
    pieces = max(1, nbytes // threads // _PIECE)
    with mmap.mmap(-1, _PIECE) as piece:  # its address is a page's, which O_DIRECT wants
        piece.write(os.urandom(_PIECE))
        direct = _allows_direct(folder / "disk-0", piece)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)

        def write(path: Path) -> None:
            handle = os.open(path, flags, 0o644)
            for _ in range(pieces):
                os.write(handle, piece)
            os.fsync(handle)
            os.close(handle)

        paths = [folder / f"disk-{number}" for number in range(threads)]
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, paths))
        took = time.perf_counter() - started
    for path in paths:
        path.unlink()
    return {"gb": threads * pieces * _PIECE / 1e9, "seconds": took, "direct": direct}


def _allows_direct(path: Path, piece: mmap.mmap) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        try:
            os.write(handle, piece)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def flush(folder: Path) -> float:
    """Seconds that it takes until every file of a folder is on the disk."""
    started = time.perf_counter()
    for path in sorted(folder.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - started
