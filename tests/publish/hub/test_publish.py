"""A release on the Hub: whole in one commit, tagged, compared; and the same command again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.destination import Operation
from quantmint.pipeline.publish.hub.client import connect
from quantmint.pipeline.publish.hub.repository import require_release
from quantmint.pipeline.publish.release import Release
from tests.publish.hub.conftest import REPO, Publisher

MakeRelease = Callable[..., Release]
SHARD = "model.safetensors"


def test_what_is_published(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    found = publisher.publish(release)
    assert publisher.files() == release.files.keys()
    assert publisher.history() == [f"{release.tag}: the model one", "initial commit"]
    assert publisher.tags() == {release.tag: publisher.head()}
    assert (found.place, found.tag, found.revision) == (REPO, release.tag, publisher.head())
    assert (found.current, found.again) == (True, False)
    assert publisher.api.model_info(REPO).private
    assert publisher.sent() == [release.files[SHARD].sha256]
    assert publisher.told.bars == [[release.size, release.size]]
    (listed,) = publisher.target().releases()
    for name, file in release.files.items():
        assert publisher.target().read(listed, name) == file.path.read_bytes()
    assert publisher.target().read(listed, "none.json") is None


def test_the_next_release_replaces_all_files_and_sends_what_is_new(
    publisher: Publisher, make_release: MakeRelease
) -> None:
    shared = {"model-00002.safetensors": b"shared" * 99}
    first = make_release("one", files={**shared, "old.txt": b"old"})
    second = make_release("two", day=22, files=shared)
    publisher.publish(first)
    sent = publisher.sent()
    publisher.publish(second)
    assert publisher.files() == second.files.keys()
    assert publisher.files(first.tag) == first.files.keys(), "a tag never moves"
    assert publisher.sent() == [*sent, second.files[SHARD].sha256]
    assert publisher.history()[0].startswith(second.tag)
    assert len(publisher.history()) == 3


def test_a_tag_that_holds_another_release(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    publisher.api.create_repo(REPO, private=True)
    publisher.api.create_tag(REPO, tag=release.tag)
    with pytest.raises(UserError, match=f"the tag {release.tag} is there, and the quantmint.json that it holds"):
        publisher.publish(release)
    with pytest.raises(UserError, match="another one"):
        publisher.target().preflight(release)


def test_what_the_hub_holds_is_compared_file_by_file(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    publisher.publish(release)
    require_release(connect(REPO), release.tag, release, "the tag")
    other = make_release("two")
    lacking = {name: file for name, file in release.files.items() if name != "config.json"}
    for files, wrong in (
        ({**release.files, SHARD: other.files[SHARD]}, f"{SHARD} differs"),
        ({**release.files, "config.json": other.files["config.json"]}, "config.json differs"),
        ({**release.files, "new.json": other.files["config.json"]}, "new.json differs"),
        (lacking, "config.json differs"),
    ):
        with pytest.raises(StageError, match=wrong):
            require_release(connect(REPO), release.tag, replace(release, files=files), "the tag")


def test_a_dry_run_tells_exactly_what_then_happens(publisher: Publisher, make_release: MakeRelease) -> None:
    first = make_release("one", files={"old.txt": b"old"})
    told = publisher.target().planned_operations(first, candidate=False)
    assert publisher.writes() == []
    assert not publisher.api.repo_exists(REPO)
    assert told == (
        Operation("create", f"private repository {REPO}"),
        *(Operation("upload", name, first.files[name].size) for name in sorted(first.files)),
        Operation("point", f"current of {REPO} to {first.tag}"),
    )
    publisher.publish(first)
    before = publisher.writes()
    assert publisher.publish(first).again
    second = make_release("one", day=22)
    told = publisher.target().planned_operations(second, candidate=False)
    assert publisher.writes() == before
    assert told == (
        Operation("upload", "quantmint.json", second.files["quantmint.json"].size),
        Operation("remove", "old.txt"),
        Operation("point", f"current of {REPO} to {second.tag}"),
    )
