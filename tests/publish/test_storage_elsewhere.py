"""Other kinds of storage that fsspec reaches, by the two that need no server."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import StageError, UserError
from pipeline.progress import PlainReporter
from pipeline.publish.release import Release
from pipeline.publish.storage import StorageTarget

MakeRelease = Callable[..., Release]
TOLD = PlainReporter(io.StringIO())


@pytest.fixture(params=["file", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> StorageTarget:
    root = "memory:/" if request.param == "memory" else "file://"
    return StorageTarget(f"{root}{tmp_path}/models", "r")


def states(target: StorageTarget) -> list[tuple[str, bool, bool]]:
    return [(release.title, release.current, release.candidate) for release in target.releases()]


def test_from_the_first_release_to_its_removal(
    target: StorageTarget, make_release: MakeRelease, tmp_path: Path
) -> None:
    first, second = make_release("one", day=1), make_release("two", day=2)
    assert states(target) == []
    target.preflight(first)
    assert target.publish(first, candidate=False, progress=TOLD).current
    assert target.publish(first, candidate=False, progress=TOLD).again
    target.publish(second, candidate=True, progress=TOLD)
    assert states(target) == [("the model two", False, True), ("the model one", True, False)]
    target.promote(None, dry_run=False, progress=TOLD)
    assert states(target) == [("the model two", True, False), ("the model one", False, False)]
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert not target.publish(second, candidate=False, progress=TOLD).current
    folder = target.fetch(tmp_path / "copy", tag=None, progress=TOLD)
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        name: file.path.read_bytes() for name, file in first.files.items()
    }
    target.remove([second.tag], dry_run=False, progress=TOLD)
    assert states(target) == [("the model one", True, False)]


def test_bytes_that_changed_after_the_verdict(target: StorageTarget, make_release: MakeRelease) -> None:
    target.publish(make_release("one", day=1), candidate=False, progress=TOLD)
    release = make_release("two", day=2)
    release.files["config.json"].path.write_bytes(b"x" * release.files["config.json"].size)
    with pytest.raises(StageError, match=r"config.json is not what was judged"):
        target.publish(release, candidate=False, progress=TOLD)
    assert states(target) == [("the model one", True, False)]
    assert target.publish(make_release("two", day=2), candidate=False, progress=TOLD).current


def test_a_half_is_written_anew(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release("one")
    half = tmp_path / "models" / "r" / release.tag / "model.safetensors"
    half.parent.mkdir(parents=True)
    half.write_bytes(release.files["model.safetensors"].path.read_bytes()[:10])
    target = StorageTarget(f"file://{tmp_path}/models", "r")
    target.publish(release, candidate=False, progress=TOLD)
    assert half.read_bytes() == release.files["model.safetensors"].path.read_bytes()


def test_what_fsspec_does_not_know(make_release: MakeRelease) -> None:
    with pytest.raises(UserError, match="Protocol not known: nosuch"):
        StorageTarget("nosuch://bucket", "r").preflight(make_release("one"))
    with pytest.raises(UserError, match="found an endpoint, which only s3:// has"):
        StorageTarget("memory://bucket", "r", "http://localhost:9000").preflight(make_release("one"))
