"""A release by way of a pull request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from quantmint.pipeline.publish.destination import Operation
from quantmint.pipeline.publish.hub.client import MovedError, RefusedError
from quantmint.pipeline.publish.release import Release
from tests.hub.standin import Fault
from tests.publish.hub.conftest import REPO, Publisher, Told

MakeRelease = Callable[..., Release]
BY_REQUEST = {"via": "pull-request"}


def statuses(publisher: Publisher) -> dict[int, str]:
    return {one.num: one.status for one in publisher.api.get_repo_discussions(REPO)}


def publish_while_main_moves(publisher: Publisher, release: Release, *, before: str) -> None:
    """Somebody commits to main just before this request is answered."""
    fault = Fault("POST", before, hold=threading.Event())
    assert fault.hold is not None
    publisher.hub.faults.append(fault)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publisher.publish, release, **BY_REQUEST)
        assert fault.reached.wait(60)
        publisher.somebody_commits()
        fault.hold.set()
        running.result()


def test_it_is_verified_and_merged(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    found = publisher.publish(release, **BY_REQUEST)
    assert (found.current, found.revision) == (True, publisher.tags()[release.tag])
    assert statuses(publisher) == {1: "merged"}
    assert publisher.files() == release.files.keys()
    assert publisher.publish(release, **BY_REQUEST).again
    second = make_release("two", day=22, files={"new.txt": b"new"})
    publisher.publish(second, **BY_REQUEST)
    assert publisher.files() == second.files.keys()
    assert statuses(publisher) == {1: "merged", 2: "merged"}


def test_a_candidate_stays_open(publisher: Publisher, make_release: MakeRelease) -> None:
    first, second = make_release("one"), make_release("two", day=22)
    publisher.publish(first, **BY_REQUEST)
    found = publisher.publish(second, candidate=True, **BY_REQUEST)
    assert not found.current
    assert statuses(publisher) == {1: "merged", 2: "open"}
    assert publisher.files() == first.files.keys()
    assert publisher.files(second.tag) == second.files.keys()
    assert publisher.publish(second, candidate=True, **BY_REQUEST).again
    publisher.target(**BY_REQUEST).promote(None, dry_run=False, progress=Told())
    assert publisher.files() == second.files.keys()
    assert statuses(publisher) == {1: "merged", 2: "merged"}


def test_one_that_was_left_open_is_gone_on_with(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    publisher.hub.faults.append(Fault("POST", "/merge", status=403))
    with pytest.raises(RefusedError, match="cannot merge pull request 1: 403"):
        publisher.publish(release, **BY_REQUEST)
    assert statuses(publisher) == {1: "open"}
    assert publisher.history() == ["initial commit"]
    told = publisher.target(**BY_REQUEST).planned_operations(release, candidate=False)
    assert told == (Operation("point", f"current of {REPO} to {release.tag}"),), "nothing is sent"
    publisher.publish(release, **BY_REQUEST)
    assert statuses(publisher) == {1: "merged"}
    assert len(publisher.sent()) == 1


def test_main_moves_before_the_merge(publisher: Publisher, make_release: MakeRelease) -> None:
    release = make_release("one")
    with pytest.raises(MovedError, match="main has moved since"):
        publish_while_main_moves(publisher, release, before="/commit/main")
    assert publisher.files() == {"NOTES.md"}
    publisher.publish(release, **BY_REQUEST)
    assert statuses(publisher) == {1: "closed", 2: "merged"}
    assert publisher.files() == release.files.keys()
    assert len(publisher.sent()) == 1
