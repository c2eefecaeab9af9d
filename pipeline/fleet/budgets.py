"""What a round may spend: wall clock, and bytes by which the store and the folders of releases grow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class Budgets:
    """``seconds`` and ``size`` (bytes) are None where there is no limit; times are of a monotonic clock."""

    def __init__(self, seconds: float | None, size: int | None, *, began: float) -> None:
        self._deadline = None if seconds is None else began + seconds
        self._size = size
        self._folders: frozenset[Path] = frozenset()
        self._before = 0

    def watch(self, folders: Iterable[Path]) -> None:
        """Count what these folders grow from now on, beside those of before; they need not exist yet."""
        more = self._folders | {folder.resolve() for folder in folders}
        if self._size is not None and more != self._folders:
            self._before += bytes_below(more) - bytes_below(self._folders)
        self._folders = more

    def left_s(self, now: float) -> float | None:
        """Seconds that are left, below zero when they are overdrawn."""
        return None if self._deadline is None else self._deadline - now

    def left_bytes(self) -> int | None:
        """Bytes that are left, below zero when they are overdrawn."""
        grown = self.grown_bytes()
        return None if self._size is None or grown is None else self._size - grown

    def grown_bytes(self) -> int | None:
        """Bytes by which the folders have grown, below zero where they shrank; None where there is no limit to that.

        Walks the folders, which costs a second for some hundred thousand files.
        """
        return None if self._size is None else bytes_below(self._folders) - self._before


def bytes_below(folders: Iterable[Path]) -> int:
    """Bytes of the files below folders. Each file counts once, whatever its names; one that goes meanwhile does not."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.lstat(f"{parent}/{name}")  # a Path for each would be slow
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    total += status.st_size
    return total
