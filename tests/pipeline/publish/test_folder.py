"""A reader of the target finds the old release or the new one, whatever happens to the publisher."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.publish.folder import publish_folder

Files = dict[str, tuple[Path, str]]
MakeFiles = Callable[[str], Files]
Forked = Callable[[Callable[[], None]], int]
CodeOf = Callable[[int], int]
STEPS = ("fsync", "rename", "replace", "link", "symlink", "unlink", "open", "mkdir", "rmdir", "utime")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
def files(tmp_path: Path) -> MakeFiles:
    """The files of a release whose contents begin with its name, somewhere else."""

    def make(release: str) -> Files:
        found: Files = {}
        for name in ("config.json", "model.safetensors", "quantmint/gate.json", "quantmint/samples/a.json"):
            source = tmp_path / "store" / release / f"{len(found)}"
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_bytes(f"{release} {name} ".encode() * 50)
            found[name] = (source, hashlib.sha256(source.read_bytes()).hexdigest())
        return found

    return make


def shown(target: Path, name: str = "r") -> Mapping[str, bytes] | None:
    """What a reader finds who follows the link once and stays there."""
    link = target / name
    if not os.path.lexists(link):
        return None
    root = link.resolve()
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def contents(files: Files) -> Mapping[str, bytes]:
    return {name: source.read_bytes() for name, (source, _) in files.items()}


def leftovers(target: Path) -> list[str]:
    """Halves, and the lock; a process that is killed while it takes the lock may leave its own few bytes there."""
    return [path.name for path in target.rglob("*") if "partial" in path.name or path.name == "lock"]


def test_what_is_published(target: Path, files: MakeFiles) -> None:
    advanced: list[int] = []
    link = publish_folder(target, "r", "v1", files("one"), advance=advanced.append)
    assert link == target / "r"
    assert shown(target) == contents(files("one"))
    assert sum(advanced) == sum(len(data) for data in contents(files("one")).values())
    assert leftovers(target) == []
    assert not link.readlink().is_absolute(), "the target may be moved as a whole"


def test_a_moved_target_still_works(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    target.rename(target.with_name("moved"))
    assert shown(target.with_name("moved")) == contents(files("one"))


def test_a_new_release_replaces_the_old_one(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    publish_folder(target, "r", "v2", files("two"))
    assert shown(target) == contents(files("two"))


def test_names_do_not_meet(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    publish_folder(target, "r.2", "v1", files("two"))
    assert shown(target) == contents(files("one"))
    assert shown(target, "r.2") == contents(files("two"))


def test_the_same_release_again_copies_nothing(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    before = {path: path.stat() for path in (target / "r").resolve().rglob("*")}
    publish_folder(target, "r", "v1", files("one"))
    after = {path: path.stat() for path in (target / "r").resolve().rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()
    }


def test_a_link_that_was_removed_comes_back(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one")).unlink()
    publish_folder(target, "r", "v1", files("one"))
    assert shown(target) == contents(files("one"))


@pytest.mark.parametrize("damage", ["flip", "lose", "add"])
def test_a_damaged_release_is_copied_anew(target: Path, files: MakeFiles, damage: str) -> None:
    """What lies under the release's name is trusted by its digests, not by its name."""
    link = publish_folder(target, "r", "v1", files("one"))
    victim = link / "model.safetensors"
    if damage == "flip":
        victim.write_bytes(b"X" + victim.read_bytes()[1:])
    elif damage == "lose":
        victim.unlink()
    else:
        (link / "stray.py").write_text("evil")
    publish_folder(target, "r", "v1", files("one"))
    assert shown(target) == contents(files("one"))
    assert leftovers(target) == []


def test_a_byte_that_changed_after_the_verdict(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    new = files("two")
    source, _ = new["model.safetensors"]
    data = bytearray(source.read_bytes())
    data[100] ^= 1
    source.write_bytes(bytes(data))
    with pytest.raises(StageError, match="is not what was judged") as refused:
        publish_folder(target, "r", "v2", new)
    assert refused.value.hint
    assert shown(target) == contents(files("one"))

    publish_folder(target, "r", "v2", files("two"))
    assert shown(target) == contents(files("two"))
    assert leftovers(target) == []


def test_a_file_that_is_gone(target: Path, files: MakeFiles) -> None:
    publish_folder(target, "r", "v1", files("one"))
    new = files("two")
    new["model.safetensors"][0].unlink()
    with pytest.raises(StageError, match="nothing was published"):
        publish_folder(target, "r", "v2", new)
    assert shown(target) == contents(files("one"))


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_what_others_put_there_is_left_alone(target: Path, files: MakeFiles, tmp_path: Path, kind: str) -> None:
    target.mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    match kind:
        case "folder":
            shutil.copytree(mine, target / "r")
        case "file":
            (target / "r").write_text("years of work")
        case "link":
            (target / "r").symlink_to(mine)
        case "dangling link":
            (target / "r").symlink_to(tmp_path / "an unmounted disk")
    before = shown(target), (target / "r").readlink() if "link" in kind else None
    with pytest.raises(StageError, match="was not published by quantmint"):
        publish_folder(target, "r", "v1", files("one"))
    assert (shown(target), (target / "r").readlink() if "link" in kind else None) == before


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


@pytest.mark.parametrize("earlier", [True, False])
def test_killed_at_every_step(
    tmp_path: Path,
    files: MakeFiles,
    forked: Forked,
    code_of: CodeOf,
    die: Callable[[], None],
    earlier: bool,
) -> None:
    old, new = files("one"), files("two")
    whole = [contents(old) if earlier else None, contents(new)]
    seen = []
    for step in range(1, 500):
        target = tmp_path / f"{step}"
        if earlier:
            publish_folder(target, "r", "v1", old)

        def attempt(target: Path = target, step: int = step) -> None:
            die_at(step, die)
            publish_folder(target, "r", "v2", new)

        code = code_of(forked(attempt))
        found = shown(target)
        assert found in whole
        seen.append(whole.index(found))

        publish_folder(target, "r", "v2", new)
        assert shown(target) == contents(new)
        assert leftovers(target) == []
        shutil.rmtree(target)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == sorted(seen), "once it is there it stays"
    assert seen.count(0) > 20, "the steps were not counted"
    assert seen.count(1) > 1


def test_killed_while_it_repairs(
    tmp_path: Path, files: MakeFiles, forked: Forked, code_of: CodeOf, die: Callable[[], None]
) -> None:
    """A damaged release is never shown again once the repair is through, and no other is lost on the way."""
    good = files("one")
    for step in range(1, 500, 3):
        target = tmp_path / f"{step}"
        link = publish_folder(target, "r", "v1", good)
        (link / "model.safetensors").write_bytes(b"damaged")

        def attempt(target: Path = target, step: int = step) -> None:
            die_at(step, die)
            publish_folder(target, "r", "v1", good)

        code = code_of(forked(attempt))
        publish_folder(target, "r", "v1", good)
        assert shown(target) == contents(good)
        assert leftovers(target) == []
        shutil.rmtree(target)
        if code == 0:
            return
    raise AssertionError("no end")


@pytest.mark.parametrize("versions", [("v1", "v1", "v1"), ("v1", "v2", "v3")])
def test_several_publishers_at_once(
    target: Path, files: MakeFiles, forked: Forked, code_of: CodeOf, versions: tuple[str, ...]
) -> None:
    releases = {version: files(version) for version in versions}
    children = [
        forked(lambda version=version: publish_folder(target, "r", version, releases[version]))  # type: ignore[misc]
        for version in versions
    ]
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in children):
        assert shown(target) in [None, *(contents(release) for release in releases.values())]
    assert [code_of(pid) for pid in children] == [0] * len(versions)
    assert shown(target) in [contents(release) for release in releases.values()]
    assert leftovers(target) == []
    for version, release in releases.items():
        kept = target / ".releases" / "r" / version
        assert {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()} == release.keys()


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


def test_a_full_disk(small_disk: Path, files: MakeFiles, tmp_path: Path) -> None:
    target = small_disk / "published"
    publish_folder(target, "r", "v1", files("one"))
    new = files("two")
    large = tmp_path / "large"
    large.write_bytes(b"x" * (2 << 20))
    new["model.safetensors"] = (large, hashlib.sha256(large.read_bytes()).hexdigest())
    with pytest.raises(StageError, match="the disk is full; nothing was published") as refused:
        publish_folder(target, "r", "v2", new)
    assert "Free space" in str(refused.value.hint)
    assert shown(target) == contents(files("one"))
    publish_folder(target, "r", "v2", files("two"))
    assert shown(target) == contents(files("two"))
    assert leftovers(target) == []


def test_a_file_that_may_not_grow(target: Path, files: MakeFiles, forked: Forked, code_of: CodeOf) -> None:
    """Needs no rights: every write past the limit fails, as on a full disk."""
    publish_folder(target, "r", "v1", files("one"))
    new = files("two")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        with pytest.raises(StageError, match="nothing was published"):
            publish_folder(target, "r", "v2", new)

    assert code_of(forked(limited)) == 0
    assert shown(target) == contents(files("one"))
    publish_folder(target, "r", "v2", new)
    assert shown(target) == contents(new)
    assert leftovers(target) == []


def test_a_target_that_cannot_be_written(target: Path, files: MakeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    publish_folder(target, "r", "v1", files("one"))
    new = files("two")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StageError, match=r"nothing was published: .*Read-only"):
        publish_folder(target, "r", "v2", new)
    monkeypatch.undo()
    assert shown(target) == contents(files("one"))
