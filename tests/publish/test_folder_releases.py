"""A folder with several releases: which one readers get, and how that changes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import StageError, UserError
from pipeline.progress import PlainReporter
from pipeline.publish.folder import FolderTarget
from pipeline.publish.release import Release
from pipeline.publish.target import Operation

MakeRelease = Callable[..., Release]
TOLD = PlainReporter(io.StringIO())


@pytest.fixture
def target(tmp_path: Path) -> FolderTarget:
    return FolderTarget(tmp_path / "published", "r")


@pytest.fixture
def three(target: FolderTarget, make_release: MakeRelease) -> tuple[Release, Release, Release]:
    """Two releases, the second of which is current, and a candidate."""
    first, second, third = (make_release(name, day=day) for name, day in (("one", 1), ("two", 2), ("three", 3)))
    target.publish(first, candidate=False, progress=TOLD)
    target.publish(second, candidate=False, progress=TOLD)
    target.publish(third, candidate=True, progress=TOLD)
    return first, second, third


def states(target: FolderTarget) -> list[tuple[str, bool, bool]]:
    return [(release.title, release.current, release.candidate) for release in target.releases()]


def read(target: FolderTarget) -> str:
    return (Path(target.place) / "config.json").read_text().split()[0]


def test_a_candidate_waits_beside_what_readers_get(
    target: FolderTarget, three: tuple[Release, Release, Release], make_release: MakeRelease
) -> None:
    assert read(target) == "two"
    assert states(target) == [
        ("the model three", False, True),
        ("the model two", True, False),
        ("the model one", False, False),
    ]
    newest = target.releases()[0]
    assert (newest.tag, newest.revision, newest.size) == (three[2].tag, three[2].identity, three[2].size)
    assert newest.created == "2026-11-03T12:00:00.000Z"
    again = target.publish(make_release("three", day=3), candidate=False, progress=TOLD)
    assert (again.again, again.current) == (True, False), "what waits is promoted by its own command"


def test_promote(target: FolderTarget, three: tuple[Release, Release, Release]) -> None:
    planned = target.promote(None, dry_run=True, progress=TOLD)
    assert (read(target), [operation.verb for operation in planned]) == ("two", ["point", "remove"])
    assert target.promote(None, dry_run=False, progress=TOLD) == planned
    assert read(target) == "three"
    assert states(target)[0] == ("the model three", True, False)
    assert target.promote(three[2].tag, dry_run=False, progress=TOLD) == ()
    with pytest.raises(UserError, match="has no candidate"):
        target.promote(None, dry_run=False, progress=TOLD)


def test_rollback_stays_when_the_same_release_is_published_again(
    target: FolderTarget, three: tuple[Release, Release, Release]
) -> None:
    first, second, _ = three
    assert target.rollback(first.tag, dry_run=True, progress=TOLD)
    assert read(target) == "two"
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert read(target) == "one"
    assert target.rollback(first.tag, dry_run=False, progress=TOLD) == ()
    again = target.publish(second, candidate=False, progress=TOLD)
    assert (again.again, again.current, read(target)) == (True, False, "one")
    assert target.operations(second, candidate=False) == ()


def test_a_rollback_to_what_is_not_there_or_damaged(
    target: FolderTarget, three: tuple[Release, Release, Release]
) -> None:
    first = three[0]
    with pytest.raises(UserError, match=rf"has no release .* \(did you mean \"{first.tag}\""):
        target.rollback(first.tag[:-1] + "z", dry_run=False, progress=TOLD)
    with pytest.raises(UserError, match="has no release"):
        target.rollback("../../r", dry_run=False, progress=TOLD)
    folder = target.fetch(None, tag=first.tag, progress=TOLD)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(StageError, match=r"is damaged: model.safetensors: found 5 bytes, expected 1,"):
        target.rollback(first.tag, dry_run=False, progress=TOLD)
    (folder / "quantmint.json").write_text("{}")
    with pytest.raises(StageError, match=r"quantmint.json is not that of"):
        target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert read(target) == "two"
    assert len(target.releases()) == 3, "a list shows what is damaged, too"


def test_remove(target: FolderTarget, three: tuple[Release, Release, Release]) -> None:
    first, second, third = three
    for kept, state in ((second, "the current release"), (third, "a candidate")):
        with pytest.raises(UserError, match=f"{kept.tag} is {state}"):
            target.remove([first.tag, kept.tag], dry_run=False, progress=TOLD)
    assert target.remove([first.tag], dry_run=True, progress=TOLD) == (Operation("remove", first.tag, first.size),)
    assert len(states(target)) == 3
    target.remove([first.tag], dry_run=False, progress=TOLD)
    assert [release.tag for release in target.releases()] == [third.tag, second.tag]
    home = Path(target.place).parent / ".releases" / "r"
    assert sorted(path.name for path in home.iterdir()) == sorted(["candidate", "chosen", second.tag, third.tag])


def test_fetch(target: FolderTarget, three: tuple[Release, Release, Release], tmp_path: Path) -> None:
    first, second, _ = three
    assert target.fetch(None, tag=None, progress=TOLD).name == second.tag
    into = tmp_path / "copy"
    assert target.fetch(into, tag=first.tag, progress=TOLD) == into
    assert {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()} == first.files.keys()
    kept = (into / "model.safetensors").stat()
    (into / "config.json").write_text("edited")
    target.fetch(into, tag=first.tag, progress=TOLD)
    assert (into / "config.json").read_bytes() == first.files["config.json"].path.read_bytes()
    assert (into / "model.safetensors").stat() == kept
    (into / "mine.txt").touch()
    with pytest.raises(UserError, match=r"found mine.txt, which is no file of the release"):
        target.fetch(into, tag=first.tag, progress=TOLD)


def test_a_damaged_release_is_not_fetched(
    target: FolderTarget, three: tuple[Release, Release, Release], tmp_path: Path
) -> None:
    victim = target.fetch(None, tag=None, progress=TOLD) / "model.safetensors"
    victim.write_bytes(b"X" + victim.read_bytes()[1:])
    with pytest.raises(StageError, match=r"model.safetensors is not what the release says"):
        target.fetch(tmp_path / "copy", tag=None, progress=TOLD)
    assert not (tmp_path / "copy" / "model.safetensors").exists()
    assert not (tmp_path / "copy" / "quantmint.json").exists()


def test_what_would_be_done(target: FolderTarget, make_release: MakeRelease) -> None:
    release = make_release("one")
    planned = target.operations(release, candidate=False)
    assert [operation for operation in planned if operation.verb == "copy"] == [
        Operation("copy", name, file.size) for name, file in sorted(release.files.items())
    ]
    assert planned[-1] == Operation("point", f"{target.place} to {release.tag}")
    assert not Path(target.place).parent.exists()
    candidate = target.operations(release, candidate=True)[-1]
    assert candidate.what == f"{Path(target.place).parent}/.releases/r/candidate to {release.tag}"


def test_releases_of_earlier_versions(target: FolderTarget, make_release: MakeRelease, tmp_path: Path) -> None:
    """Folders of 16 hex digits, without a manifest."""
    home = tmp_path / "published" / ".releases" / "r"
    (home / "3f1c0a52e7d94b60").mkdir(parents=True)
    (home / "3f1c0a52e7d94b60" / "config.json").write_text("old release")
    Path(target.place).symlink_to(Path(".releases", "r", "3f1c0a52e7d94b60"))
    target.publish(make_release("one", day=1), candidate=False, progress=TOLD)
    assert read(target) == "one"
    assert {(release.tag, release.title) for release in target.releases()} >= {("3f1c0a52e7d94b60", "")}
    target.rollback("3f1c0a52e7d94b60", dry_run=False, progress=TOLD)
    assert read(target) == "old"
    assert target.fetch(tmp_path / "copy", tag="3f1c0a52e7d94b60", progress=TOLD).is_dir()
    assert (tmp_path / "copy" / "config.json").read_text() == "old release"


def test_nothing_is_there(target: FolderTarget) -> None:
    assert target.releases() == ()
    with pytest.raises(UserError, match="nothing is published there"):
        target.fetch(None, tag=None, progress=TOLD)


def test_a_file_where_the_folder_should_be(target: FolderTarget, make_release: MakeRelease, tmp_path: Path) -> None:
    (tmp_path / "published").write_text("years of work")
    with pytest.raises(UserError, match=r"published cannot be written"):
        target.preflight(make_release("one"))
    assert (tmp_path / "published").read_text() == "years of work"


def test_what_was_promoted_waits_no_more(target: FolderTarget, three: tuple[Release, Release, Release]) -> None:
    """Killed after the link was renamed, before the candidate's was removed."""
    target.promote(None, dry_run=False, progress=TOLD)
    (Path(target.place).parent / ".releases/r/candidate").symlink_to(three[2].tag)
    operations = target.rollback(three[0].tag, dry_run=False, progress=TOLD)
    assert [operation.verb for operation in operations] == ["point", "remove"]
    assert not any(release.candidate for release in target.releases())
