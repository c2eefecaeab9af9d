"""What a round may spend: wall clock, and bytes by which the store and the folders of releases grow.

Growth is measured by walking the folders, a second for some hundred thousand files: so when something is about to
begin, and not again within a minute, or twenty times what the walk took, unless a recipe has ended since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Final

_STANDS_S: Final = 60.0
_STANDS: Final = 20.0  # times what it took


class Budgets:
    """``seconds`` and ``size`` (bytes) are None where there is no limit; times are of a monotonic clock."""

    def __init__(self, seconds: float | None, size: int | None, *, began: float) -> None:
        self._deadline = None if seconds is None else began + seconds
        self._size = size
        self._folders: frozenset[Path] = frozenset()
        self._before = 0
        self._linked: set[tuple[int, int]] = set()
        self._grown = 0
        self._stands_until = 0.0

    def watch(self, folders: Iterable[Path]) -> None:
        """Count what these folders grow from now on, beside those of before; they need not exist yet."""
        resolved = {folder.resolve() for folder in folders}
        new = {one for one in resolved if not any(one.is_relative_to(known) for known in self._folders)}
        self._folders |= new
        if self._size is not None:
            self._before += bytes_below(new, self._linked)

    def left_s(self, now: float) -> float | None:
        """Seconds that are left, below zero when they are overdrawn."""
        return None if self._deadline is None else self._deadline - now

    def left_bytes(self) -> int | None:
        """Bytes that were left when that was last measured, below zero when they were overdrawn."""
        return None if self._size is None else self._size - self._grown

    def measure(self) -> None:
        """Find out how much is left, for a beginning; what was measured lately stands."""
        if self._size is not None and monotonic() >= self._stands_until:
            began = monotonic()
            self._grown = bytes_below(self._folders) - self._before
            ended = monotonic()
            self._stands_until = ended + max(_STANDS_S, _STANDS * (ended - began))

    def spent(self) -> None:
        """A recipe has ended: what was measured does not stand any more."""
        self._stands_until = 0.0

    def grown_bytes(self) -> int | None:
        """Bytes by which the folders have grown now, below zero where they shrank; None where there is no limit."""
        return None if self._size is None else bytes_below(self._folders) - self._before


def bytes_below(folders: Iterable[Path], linked: set[tuple[int, int]] | None = None) -> int:
    """Bytes of the files below folders. Each file counts once, whatever its names; one that goes meanwhile does not.

    ``linked`` are files of several names (device, inode) that were counted before; those of here are added.
    """
    total = 0
    seen = set() if linked is None else linked
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.lstat(f"{parent}/{name}")  # a Path for each would be slow
                except OSError:
                    continue
                if status.st_nlink > 1:
                    file = (status.st_dev, status.st_ino)
                    if file in seen:
                        continue
                    seen.add(file)
                total += status.st_size
    return total
