"""A reader of the folder finds the old release or the new one, whatever happens to the publisher."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.destination import Publication
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.release import Release

MakeRelease = Callable[..., Release]
Forked = Callable[[Callable[[], None]], int]
CodeOf = Callable[[int], int]
STEPS = ("fsync", "rename", "replace", "link", "symlink", "unlink", "open", "mkdir", "rmdir", "utime")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "published"


def publish(folder: Path, release: Release, *, candidate: bool = False, name: str = "r") -> Publication:
    return FolderDestination(folder, name).publish(release, candidate=candidate, progress=PlainReporter(io.StringIO()))


def shown(folder: Path, name: str = "r") -> Mapping[str, bytes] | None:
    """What a reader finds who follows the link once and stays there."""
    link = folder / name
    if not os.path.lexists(link):
        return None
    root = link.resolve()
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def contents(release: Release) -> Mapping[str, bytes]:
    return {name: file.path.read_bytes() for name, file in release.files.items()}


def leftovers(folder: Path) -> list[str]:
    """Halves, and the lock; a process that is killed while it takes the lock may leave its own few bytes there."""
    return [path.name for path in folder.rglob("*") if "partial" in path.name or path.name in ("lock", "pending")]


def test_what_is_published(folder: Path, make_release: MakeRelease) -> None:
    release = make_release("one")
    lines = io.StringIO()
    found = FolderDestination(folder, "r").publish(release, candidate=False, progress=PlainReporter(lines))
    assert found == Publication(str(folder / "r"), release.tag, release.identity, current=True, again=False)
    assert shown(folder) == contents(release)
    assert f"100 % of {release.size:,} B" in lines.getvalue()
    assert leftovers(folder) == []
    assert (folder / "r").readlink() == Path(".releases", "r", release.tag), "the folder may be moved as a whole"


def test_the_store_may_be_edited_afterwards(folder: Path, make_release: MakeRelease) -> None:
    release = make_release("one")
    before = contents(release)
    publish(folder, release)
    for file in release.files.values():
        with file.path.open("r+b") as stream:
            stream.write(b"edited")
    assert shown(folder) == before


def test_a_link_that_was_removed_comes_back(folder: Path, make_release: MakeRelease) -> None:
    publish(folder, make_release("one"))
    (folder / "r").unlink()
    assert publish(folder, make_release("one")).current
    assert shown(folder) == contents(make_release("one"))


def test_a_file_that_is_gone(folder: Path, make_release: MakeRelease) -> None:
    publish(folder, make_release("one"))
    new = make_release("two")
    new.files["model.safetensors"].path.unlink()
    with pytest.raises(StageError, match=r"No such file or directory: .*model\.safetensors"):
        publish(folder, new)
    assert shown(folder) == contents(make_release("one"))


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_what_others_put_there_is_left_alone(
    folder: Path, make_release: MakeRelease, tmp_path: Path, kind: str
) -> None:
    folder.mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    match kind:
        case "folder":
            shutil.copytree(mine, folder / "r")
        case "file":
            (folder / "r").write_text("years of work")
        case "link":
            (folder / "r").symlink_to(mine)
        case "dangling link":
            (folder / "r").symlink_to(tmp_path / "an unmounted disk")
    before = shown(folder), (folder / "r").readlink() if "link" in kind else None
    release = make_release("one")
    target = FolderDestination(folder, "r")
    for attempt in (
        lambda: target.preflight(release),
        lambda: target.planned_operations(release, candidate=False),
        lambda: publish(folder, release),
    ):
        with pytest.raises(UserError, match="was not published by quantmint"):
            attempt()
    assert (shown(folder), (folder / "r").readlink() if "link" in kind else None) == before


def die_at(fatal_step: int, die: Callable[[], None]) -> None:
    count = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == fatal_step:
                die()
            return original(*args, **kwargs)

        return step

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    io.open = counted(io.open)  # type: ignore[assignment]


@pytest.mark.parametrize(("earlier", "stride"), [pytest.param(True, 1, marks=pytest.mark.slow), (True, 5), (False, 5)])
def test_killed_at_every_step(
    tmp_path: Path,
    make_release: MakeRelease,
    forked: Forked,
    code_of: CodeOf,
    die: Callable[[], None],
    earlier: bool,
    stride: int,
) -> None:
    old, new = make_release("one"), make_release("two")
    whole = [contents(old) if earlier else None, contents(new)]
    seen = []
    for step in range(1, 500, stride):
        folder = tmp_path / f"{step}"
        if earlier:
            publish(folder, old)

        def attempt(folder: Path = folder, step: int = step) -> None:
            die_at(step, die)
            publish(folder, new)

        code = code_of(forked(attempt))
        found = shown(folder)
        assert found in whole
        seen.append(whole.index(found))

        assert publish(folder, new).current
        assert shown(folder) == contents(new)
        assert leftovers(folder) == []
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == sorted(seen), "once it is there it stays"
    assert seen.count(0) > 20 // stride, "the steps were not counted"
    assert seen.count(1) > 1


@pytest.mark.parametrize("names", [("a", "a", "a"), ("a", "b", "c")])
def test_several_publishers_at_once(
    folder: Path, make_release: MakeRelease, forked: Forked, code_of: CodeOf, names: tuple[str, ...]
) -> None:
    releases = {name: make_release(name) for name in names}
    children = [
        forked(lambda name=name: publish(folder, releases[name]))  # type: ignore[misc]
        for name in names
    ]
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in children):
        assert shown(folder) in [None, *(contents(release) for release in releases.values())]
    assert [code_of(pid) for pid in children] == [0] * len(names)
    assert shown(folder) in [contents(release) for release in releases.values()]
    assert leftovers(folder) == []
    for release in releases.values():
        kept = folder / ".releases" / "r" / release.tag
        assert {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()} == release.files.keys()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk(small_disk: Path, make_release: MakeRelease) -> None:
    folder = small_disk / "published"
    publish(folder, make_release("one"))
    large = make_release("large", files={"model.safetensors": b"x" * (2 << 20)})
    with pytest.raises(StageError, match=r"the release has 2,[0-9,]+ bytes, the disk has [0-9,]+ free"):
        FolderDestination(folder, "r").preflight(large)
    with pytest.raises(StageError, match="the disk is full") as refused:
        publish(folder, large)
    assert "make room" in str(refused.value.hint)
    assert shown(folder) == contents(make_release("one"))
    FolderDestination(folder, "r").preflight(make_release("two"))  # what the attempt left there will not be in the way
    publish(folder, make_release("two"))
    assert shown(folder) == contents(make_release("two"))
    assert leftovers(folder) == []
