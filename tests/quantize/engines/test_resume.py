from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.quantize.engines.stream import disk, schedule
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from tests.quantize.engines.conftest import layers

ROOT = Path(__file__).parents[3]
FIRST = "model-00001-of-00004.safetensors"
THIRD = "model-00003-of-00004.safetensors"
LAST = "model-00004-of-00004.safetensors"

Run = Callable[..., dict[str, bytes]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


@pytest.fixture
def undisturbed(run: Run, small: Checkpoint, tmp_path: Path) -> dict[str, bytes]:
    return run(small, tmp_path / "undisturbed")


def killed(jobs: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(tmp_path / "jobs.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    results: list[dict[str, Any]] = json.loads(finished.stdout)
    return results


@pytest.mark.slow
def test_killed_after_any_tensor_it_redoes_only_what_was_not_committed(
    small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    # After each of the 5 tensors of each of the 4 files.
    points: list[int] = []
    for name in small.shards:
        for info in small.in_shard(name):
            points.append((points[-1] if points else 0) + info.nbytes)
    assert len(points) == 20
    source = str(small.folder)
    jobs = [{"source": source, "work": str(tmp_path / f"at-{at}"), "at": at} for at in points]
    committed = set()
    for number, result in enumerate(killed(jobs, tmp_path)):
        assert result["killed"] == [-9]
        # Files are flushed and committed behind the workers, several of which are at work on files of their own.
        count = len(result["before"])
        assert set(result["before"]) <= set(small.shards)
        assert count <= number // 5
        assert result["partial"]
        assert all(name.endswith(PARTIAL_SUFFIX) for name in result["partial"])
        assert result["code"] == 0
        assert sorted(result["after"]) == list(small.shards)
        assert {name: result["after"][name] for name in result["before"]} == result["before"]
        assert contents(Path(jobs[number]["work"]) / "checkpoint") == undisturbed
        committed.add(count)
    assert len(committed) > 1, "no kill came after a commit"


def test_killed_at_any_time_it_completes(small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    delays = [[0.001 * step] * 3 for step in range(1, 60, 6)]
    jobs = [
        {"source": str(small.folder), "work": str(tmp_path / f"after-{number}"), "after": after}
        for number, after in enumerate(delays)
    ]
    results = killed(jobs, tmp_path)
    assert {-9} <= {code for result in results for code in result["killed"]} <= {-9, 0}
    for job, result in zip(jobs, results, strict=True):
        assert result["code"] == 0
        assert {name: result["after"][name] for name in result["before"]} == result["before"]
        assert contents(Path(job["work"]) / "checkpoint") == undisturbed


def test_a_second_run_reads_no_weight(
    run: Run, small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(small, tmp_path / "work")
    before = inodes(tmp_path / "work" / "checkpoint")
    monkeypatch.setattr(schedule, "OpenShard", lambda *_, **__: pytest.fail("a committed file was made again"))
    seen: list[int] = []
    assert run(small, tmp_path / "work", advance=seen.append) == first
    assert inodes(tmp_path / "work" / "checkpoint") == before
    assert sum(seen) == small.nbytes


@pytest.mark.parametrize(
    "tail", ['{"name": "model-00004', '{"name": "x"}', "[]", "17", "null", "\0\0\0\0", "\N{SNOWMAN}", "{}\n\n"]
)
def test_a_manifest_line_that_was_cut_short_costs_one_file(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path, tail: str
) -> None:
    work = tmp_path / "work"
    run(small, work)
    lines = [line for line in (work / "manifest.jsonl").read_text().splitlines() if LAST not in line]
    assert len(lines) == 3
    (work / "manifest.jsonl").write_text("\n".join([*lines, tail]), encoding="utf-8")
    before = inodes(work / "checkpoint")
    assert run(small, work) == undisturbed
    after = inodes(work / "checkpoint")
    assert {name for name in before if before[name] != after[name]} == {LAST}
    assert run(small, work) == undisturbed
    assert inodes(work / "checkpoint") == after, "the line after the broken one was lost"


def test_a_leftover_of_a_killed_run_is_removed(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "work" / "checkpoint"
    folder.mkdir(parents=True)
    for name in (FIRST, "config.json", "of-another-version.safetensors"):
        (folder / f"{name}{PARTIAL_SUFFIX}").write_bytes(b"half")
    assert run(small, tmp_path / "work") == undisturbed


def test_a_source_file_that_shrank_is_named_and_the_rest_is_kept(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    work, victim = tmp_path / "work", small.folder / THIRD
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-100])
    with pytest.raises(StageError) as broken:
        run(small, work)
    assert str(victim) in str(broken.value)
    done = {name: data for name, data in contents(work / "checkpoint").items() if name in small.shards}
    assert done == {name: undisturbed[name] for name in set(done) - {THIRD}}
    victim.write_bytes(whole)
    assert run(small, work) == undisturbed


def test_a_read_error_names_the_file_that_could_not_be_read(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, reads = os.preadv, 0

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal reads
        bad = THIRD in str(Path(f"/proc/self/fd/{descriptor}").readlink())
        reads += bad
        if bad and reads == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(StageError, match="Input/output error") as broken:
            run(small, tmp_path / "work")
    assert str(small.folder / THIRD) in str(broken.value)
    assert run(small, tmp_path / "work") == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 192 KiB, which two and a half of the four files fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_said_to_be_full_and_a_later_run_completes(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], small_disk: Path
) -> None:
    with pytest.raises(StageError, match=r"the disk is full: .* bytes are free of .* in all") as full:
        run(small, small_disk)
    assert str(small_disk) in str(full.value)
    assert "finished files are kept" in str(full.value)
    kept = inodes(small_disk / "checkpoint")
    assert kept
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert run(small, small_disk) == undisturbed
    assert kept.items() <= inodes(small_disk / "checkpoint").items()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_failing_write_anywhere_in_a_file_leaves_nothing_half_committed(
    run: Run,
    small: Checkpoint,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """Needs no rights: the n-th write fails, for every n of the first two files."""
    original = os.pwrite
    for fatal in range(1, 16, 2):
        work, count = tmp_path / f"work-{number}-{fatal}", 0

        def write(descriptor: int, data: Any, offset: int, fatal: int = fatal) -> int:
            nonlocal count
            count += 1
            if count == fatal:
                raise OSError(number, os.strerror(number))
            return original(descriptor, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(StageError, match="the disk is full"):
                run(small, work)
        done = {name: data for name, data in contents(work / "checkpoint").items() if name in small.shards}
        assert done == {name: undisturbed[name] for name in done}
        assert run(small, work) == undisturbed


@pytest.mark.parametrize("batch", [1, 64 << 20], ids=["while it grows", "at its end"])
def test_a_bit_that_turns_between_kernel_and_disk_is_noticed(
    run: Run,
    small: Checkpoint,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    """The file is read back before it is committed: neither the hash nor the error of a weight would know."""
    monkeypatch.setattr(disk, "_BATCH", batch)
    original, count, work = os.pwrite, 0, tmp_path / "work"

    def write(descriptor: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        harmed = bytearray(data)
        harmed[len(harmed) // 2] ^= 0x10 if count == 9 else 0
        return original(descriptor, harmed, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(StageError, match="is not what was written"):
            run(small, work)
    assert run(small, work) == undisturbed


def test_words_that_lie_in_another_order_are_noticed(
    run: Run, small: Checkpoint, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count, work = os.pwrite, 0, tmp_path / "work"

    def write(descriptor: int, data: Any, offset: int) -> int:
        nonlocal count
        count += len(data) > 4096
        moved = bytes(data[8:16]) + bytes(data[:8]) + bytes(data[16:]) if count == 3 else data
        return original(descriptor, moved, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(StageError, match="is not what was written"):
            run(small, work)
    assert run(small, work) == undisturbed


def test_a_file_is_read_back_from_the_disk_not_from_the_page_cache(
    run: Run, small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushed, its pages dropped, and only then read."""
    steps: dict[str, list[str]] = {name: [] for name in small.shards}

    def watch(name: str, step: str, *, of: int | None = None) -> None:
        original = getattr(os, name)

        def watched(descriptor: int, *more: Any) -> Any:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            shard = path.name.removesuffix(PARTIAL_SUFFIX)
            if shard in steps and path.parent != small.folder and (of is None or more[-1] == of):
                steps[shard].append(step)
            return original(descriptor, *more)

        monkeypatch.setattr(os, name, watched)

    watch("fsync", "flush")
    watch("posix_fadvise", "drop", of=os.POSIX_FADV_DONTNEED)
    watch("preadv", "read")
    run(small, tmp_path / "work")
    for shard in small.shards:
        assert steps[shard][:3] == ["flush", "drop", "read"], steps[shard]


def test_after_a_commit_that_failed_no_further_file_is_begun(
    run: Run,
    write_model: Callable[..., Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write_model(tmp_path / "many", layers(24, 128))
    made: list[str] = []
    refused = threading.Event()
    original = schedule.OpenShard

    def opened(plan: Any, *more: Any, **named: Any) -> Any:
        made.append(plan.name)
        if len(made) > 12:
            assert refused.wait(10)
            time.sleep(0.05)
        return original(plan, *more, **named)

    def full(_: Path) -> None:
        refused.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(schedule, "OpenShard", opened)
    monkeypatch.setattr(schedule, "fsync", full)
    with pytest.raises(StageError, match="the disk is full"):
        run(model, tmp_path / "work")
    assert len(made) < 24
    assert not any((tmp_path / "work" / "checkpoint").glob("*.safetensors"))
