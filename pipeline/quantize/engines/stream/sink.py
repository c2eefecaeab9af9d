"""Two ways of writing a file.

`Buffered` hands every part to the page cache as soon as it is there, at any place: memory speed, as long as there are
cores to copy with, which there are beside a GPU. `Direct` collects the parts in their order and lets the disk fetch
whole blocks by itself: on a CPU that computes, the cores are what is short, and copying into fresh pages of the cache
would take as many of them as quantizing does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})  # of tmpfs and some network filesystems
_BLOCK = 4 << 20  # bytes of one direct write; a multiple of every disk's own block
_BLOCKS = 3  # one that is filled, two that are on their way


class Buffered:
    """Through the page cache."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._early: set[int] = set()
        os.truncate(descriptor, size)

    def early(self, offset: int, data: memoryview) -> None:
        """Take a part in any order, from any thread."""
        self._early.add(offset)
        _write(self._descriptor, data, offset)

    def append(self, offset: int, data: memoryview) -> None:
        """Take a part in its order; one that came early already is known by its offset alone."""
        if offset in self._early:
            self._early.discard(offset)
        else:
            _write(self._descriptor, data, offset)

    def finish(self) -> None:
        """Write the rest. Not yet flushed to the disk for good."""

    def close(self) -> None:
        """Let go of everything, also after a failure."""
        os.close(self._descriptor)


class Direct:
    """Past the page cache: parts are copied into aligned blocks, which another thread writes."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        _reserve(descriptor, size)
        self._writer = ThreadPoolExecutor(1, "direct")
        # Anonymous mappings begin at a page, which is as aligned as any disk wants it.
        self._free = deque(mmap.mmap(-1, _BLOCK) for _ in range(_BLOCKS))
        self._flying: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._block = self._free.popleft()
        self._filled, self._offset = 0, 0

    def early(self, offset: int, data: memoryview) -> None:
        """Do nothing: order is what makes blocks."""

    def append(self, offset: int, data: memoryview) -> None:
        """Take a part in its order."""
        assert offset == self._offset + self._filled, (offset, self._offset, self._filled)  # noqa: S101
        while data.nbytes:
            count = min(data.nbytes, _BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BLOCK:
                self._send()

    def finish(self) -> None:
        """Write the last block whole, and cut the file to its size."""
        if self._filled:
            self._block[self._filled :] = bytes(_BLOCK - self._filled)
            self._send()
        while self._flying:
            self._landed()
        os.truncate(self._descriptor, self._size)

    def close(self) -> None:
        """Let go of everything, also after a failure."""
        self._writer.shutdown()
        os.close(self._descriptor)

    def _send(self) -> None:
        flight = self._writer.submit(_write, self._descriptor, memoryview(self._block), self._offset)
        self._flying.append((flight, self._block))
        self._offset, self._filled = self._offset + _BLOCK, 0
        if not self._free:
            self._landed()
        self._block = self._free.popleft()

    def _landed(self) -> None:
        flight, block = self._flying.popleft()
        self._free.append(block)
        flight.result()


Sink = Buffered | Direct


def open_sink(path: Path, size: int, *, direct: bool) -> Sink:
    """Make a file of ``size`` bytes; direct only where the filesystem can. Errors of the disk are `OSError`."""
    flags, kind = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, Direct if direct and size >= _BLOCK else Buffered
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if kind is Direct else 0), 0o666)
    except OSError as error:
        if kind is Buffered or error.errno not in _CANNOT:
            raise
        kind, descriptor = Buffered, os.open(path, flags, 0o666)
    try:
        return kind(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def _reserve(descriptor: int, size: int) -> None:
    """Have the disk find the room beforehand: twice as fast as block by block, and a full disk is known at once."""
    try:
        _fallocate(descriptor, size)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def _fallocate(descriptor: int, size: int) -> None:
    """The system call: `os.posix_fallocate` writes a byte into every 4 KiB where a filesystem has none.

    NFS has none before 4.2, and each of those bytes would be a message to the server.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        offset += count
        data = data[count:]
