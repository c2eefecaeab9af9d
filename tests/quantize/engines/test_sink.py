from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import StageError
from pipeline.quantize.engines.stream import shard, worker
from pipeline.quantize.engines.stream.worker import Buffered, Direct, open_sink
from pipeline.quantize.formats.checkpoint import Checkpoint

BLOCK = 4096
Run = Callable[..., dict[str, bytes]]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes get what large ones do."""
    monkeypatch.setattr(worker, "_BLOCK", BLOCK)


@pytest.fixture
def where_direct_writes_work(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct writes in {tmp_path}: {error}")
    return tmp_path


def parts(size: int, width: int) -> Iterator[tuple[int, bytes]]:
    data = os.urandom(size)
    yield from ((start, data[start : start + width]) for start in range(0, size, width))


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 3 * BLOCK, 17 * BLOCK - 5])
@pytest.mark.parametrize("width", [1000, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("direct", [True, False])
def test_the_file_is_what_was_appended(
    where_direct_writes_work: Path, small_blocks: None, size: int, width: int, direct: bool
) -> None:
    path = where_direct_writes_work / "file"
    made = open_sink(path, size, direct=direct)
    assert type(made) is (Direct if direct else Buffered)
    expected = b""
    for offset, data in parts(size, width):
        made.early(offset, memoryview(data))
        made.append(offset, memoryview(data))
        expected += data
    made.finish()
    made.close()
    assert path.read_bytes() == expected


def test_small_files_and_filesystems_without_direct_writes_go_through_the_cache(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(open_sink(tmp_path / "small", BLOCK - 1, direct=True)) is Buffered
    original = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert type(open_sink(tmp_path / "large", 10 * BLOCK, direct=True)) is Buffered


def test_a_full_disk_is_noticed_when_the_room_is_reserved(
    run: Run, small: Checkpoint, where_direct_writes_work: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(worker, "_fallocate", full)
    with pytest.raises(StageError, match="the disk is full"):
        run(small, where_direct_writes_work / "work")
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_the_engine_writes_the_same_bytes_either_way(
    run: Run, small: Checkpoint, where_direct_writes_work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffered = run(small, where_direct_writes_work / "buffered")
    monkeypatch.setattr(worker, "_BLOCK", BLOCK)
    kinds = []
    monkeypatch.setattr(shard, "open_sink", lambda *a, **k: kinds.append(open_sink(*a, **k)) or kinds[-1])
    assert run(small, where_direct_writes_work / "direct") == buffered
    assert {type(kind) for kind in kinds} == {Direct}


def test_a_failing_direct_write_leaves_nothing_half_committed(
    run: Run, small: Checkpoint, where_direct_writes_work: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(small, where_direct_writes_work / "undisturbed")
    original = os.pwrite
    for fatal in range(1, 40, 5):
        work, count = where_direct_writes_work / str(fatal), 0

        def write(descriptor: int, data: Any, offset: int, fatal: int = fatal) -> int:
            nonlocal count
            count += 1
            if count == fatal:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(descriptor, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(StageError, match="Input/output error"):
                run(small, work)
        assert run(small, work) == undisturbed


@pytest.mark.parametrize("direct", [True, False])
def test_a_bit_that_turns_between_kernel_and_disk_is_noticed(
    run: Run, small: Checkpoint, where_direct_writes_work: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """The file is read back before it is committed: neither the hash nor the error of a weight would know."""
    if direct:
        monkeypatch.setattr(worker, "_BLOCK", BLOCK)
    undisturbed = run(small, where_direct_writes_work / "undisturbed")
    original, count, work = os.pwrite, 0, where_direct_writes_work / "work"

    def write(descriptor: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        # A direct write must be of aligned memory, and only after the hash; the other comes before it.
        harmed = data if direct else bytearray(data)
        harmed[len(harmed) // 2] ^= 0x10 if count == 9 else 0
        return original(descriptor, harmed, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(StageError, match="is not what was written"):
            run(small, work)
    assert run(small, work) == undisturbed
