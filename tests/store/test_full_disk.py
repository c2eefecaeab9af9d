from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.tree import Store

PAYLOAD: dict[str, object] = {"stage": "quantize", "version": 1, "inputs": {}}
DIGEST = fingerprint(PAYLOAD)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


def test_full_while_the_stage_writes(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    full = pytest.raises(StoreError, match=r"the disk is full: .*\.work \(.* bytes free\)")
    with full as caught, store.working("quantize", DIGEST) as work:
        (work.path / "shard").write_bytes(b"x" * (2 << 20))
    assert "gc" in str(caught.value)
    assert store.find("quantize", DIGEST) is None


def test_full_at_the_record(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    with store.working("quantize", DIGEST) as work:
        (work.path / "shard").write_bytes(b"finished")
        filler = fill(small_disk)
        with pytest.raises(StoreError, match=r"the disk is full: .*bytes needed, 0 bytes free"):
            work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
    assert store.find("quantize", DIGEST) is None
    filler.unlink()
    with store.working("quantize", DIGEST) as work:
        assert (work.path / "shard").read_bytes() == b"finished"
        work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
    entry = store.find("quantize", DIGEST)
    assert entry is not None
    entry.verify()


def test_a_limit_on_the_size_of_files(tmp_path: Path, child: Callable[[Callable[[], None], int], int]) -> None:
    """Needs no rights: every write past the limit fails, as on a full disk."""
    store = Store(tmp_path)

    def limited() -> None:
        with store.working("quantize", DIGEST) as work:
            (work.path / "one").write_bytes(b"1")
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            try:
                work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
            except StoreError as error:
                assert "grow" in str(error)  # noqa: PT017  (the process ends here: its exit code is the result)
                return
        raise AssertionError

    assert child(limited, 10_000) == 0
    assert store.find("quantize", DIGEST) is None
    commit(store)
    assert store.find("quantize", DIGEST) is not None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "12 bytes needed"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_each_fault_says_where_it_happened(tmp_path: Path, number: int, words: str) -> None:
    path = tmp_path / "not" / "made" / "yet"
    with pytest.raises(StoreError) as caught, disk_errors(path, needed=12):
        raise OSError(number, os.strerror(number))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.hint


def commit(store: Store) -> None:
    with store.working("quantize", DIGEST) as work:
        (work.path / "one").write_bytes(b"1")
        work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
