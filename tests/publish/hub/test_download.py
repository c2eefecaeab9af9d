"""What is fetched of a release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.release import Release
from tests.publish.hub.conftest import Publisher

MakeRelease = Callable[..., Release]


def held(folder: Path) -> dict[str, bytes]:
    """Names and bytes, without what the client keeps for itself."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not name.startswith(".cache/")}


def contents(release: Release) -> dict[str, bytes]:
    return {name: file.path.read_bytes() for name, file in release.files.items()}


def test_the_current_one_and_one_by_its_tag(publisher: Publisher, make_release: MakeRelease, tmp_path: Path) -> None:
    first, second = make_release("one", files={"a[1].txt": b"a"}), make_release("two", day=22)
    publisher.publish(first)
    publisher.publish(second)
    target = publisher.target()
    assert held(target.fetch(tmp_path / "a", tag=None, progress=publisher.told)) == contents(second)
    assert held(target.fetch(tmp_path / "b", tag=first.tag, progress=publisher.told)) == contents(first)
    assert held(target.fetch(None, tag=first.tag, progress=publisher.told)) == contents(first)
    asked = len(publisher.hub.sent("GET", "/storage/"))
    target.fetch(tmp_path / "a", tag=None, progress=publisher.told)
    assert len(publisher.hub.sent("GET", "/storage/")) == asked


def test_a_part_of_one(publisher: Publisher, make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release("one")
    publisher.publish(release)
    target = publisher.target()
    found = target.fetch(tmp_path / "a", tag=None, progress=publisher.told, select=lambda name: "/" in name)
    assert held(found) == {name: data for name, data in contents(release).items() if "/" in name}


def test_what_is_not_there(publisher: Publisher, make_release: MakeRelease) -> None:
    target = publisher.target()
    with pytest.raises(UserError, match="there is no such repository"):
        target.fetch(None, tag=None, progress=publisher.told)
    release = make_release("one")
    publisher.publish(release, candidate=True)
    with pytest.raises(UserError, match=r"holds no release at .*: it has no quantmint\.json"):
        target.fetch(None, tag=None, progress=publisher.told)
    with pytest.raises(UserError, match=f'no release {release.tag[:-1]}x .did you mean "{release.tag}"'):
        target.fetch(None, tag=release.tag[:-1] + "x", progress=publisher.told)


def test_names_that_lead_out_are_refused(publisher: Publisher, make_release: MakeRelease, tmp_path: Path) -> None:
    publisher.publish(make_release("one"))
    publisher.somebody_commits("CONFIG.json")
    with pytest.raises(UserError, match="are one on some file systems"):
        publisher.target().fetch(tmp_path / "a", tag=None, progress=publisher.told)
    assert not (tmp_path / "a").exists()
