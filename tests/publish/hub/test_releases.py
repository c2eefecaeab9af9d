"""Going from one release of a repository to another: one commit that sends no weights, or a merge."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.hub.client import MovedError
from quantmint.pipeline.publish.release import Release
from tests.hub.standin import Fault
from tests.publish.conftest import MakeRelease
from tests.publish.hub.conftest import REPO, Publisher, Told

BY_REQUEST = {"via": "pull-request"}


@pytest.fixture
def three(make_release: MakeRelease) -> tuple[Release, Release, Release]:
    """Each has a file that the others do not have."""
    first, second, third = (
        make_release(name, day=day, files={f"only-{name}.txt": b"only here", "tokenizer.json": b"{}"})
        for name, day in (("one", 1), ("two", 2), ("three", 3))
    )
    return first, second, third


def promote(publisher: Publisher, tag: str | None = None) -> list[tuple[str, str]]:
    done = publisher.target().promote(tag, dry_run=False, progress=Told())
    return [(one.verb, one.what) for one in done]


def rollback(publisher: Publisher, tag: str) -> list[tuple[str, str]]:
    done = publisher.target().rollback(tag, dry_run=False, progress=Told())
    return [(one.verb, one.what) for one in done]


def flags(publisher: Publisher) -> dict[str, str]:
    return {
        one.tag: "current" if one.current else "candidate" if one.candidate else ""
        for one in publisher.target().releases()
    }


def test_a_candidate_becomes_current_by_one_commit_that_sends_no_shard(
    publisher: Publisher, three: tuple[Release, Release, Release]
) -> None:
    first, second, _ = three
    publisher.publish(first)
    publisher.publish(second, candidate=True)
    sent, before = publisher.sent(), publisher.history()
    done = promote(publisher)
    assert publisher.files() == second.files.keys()
    assert publisher.history() == [f"Promote {second.tag}", *before]
    assert publisher.sent() == sent
    assert done == [("point", f"current of {REPO} to {second.tag}")]
    assert "candidate" not in {ref.name for ref in publisher.api.list_repo_refs(REPO).branches}


def test_a_pull_request_from_an_older_main_is_not_mixed_into_it(
    publisher: Publisher, three: tuple[Release, Release, Release]
) -> None:
    first, second, third = three
    publisher.publish(first)
    publisher.publish(second, candidate=True, **BY_REQUEST)
    publisher.publish(third)
    promote(publisher, second.tag)
    assert publisher.hub.repo(REPO).discussion(1)["status"] == "closed"
    assert publisher.files() == second.files.keys(), "merged, it would have kept only-three.txt"
    assert flags(publisher) == {third.tag: "", second.tag: "current", first.tag: ""}


def test_which_of_two_candidates_is_meant(publisher: Publisher, three: tuple[Release, Release, Release]) -> None:
    first, second, third = three
    publisher.publish(first)
    publisher.publish(second, candidate=True)
    publisher.publish(third, candidate=True, **BY_REQUEST)
    with pytest.raises(UserError, match=f"has 2 candidates, expected the tag of one: .*{second.tag}"):
        promote(publisher)
    promote(publisher, third.tag)
    assert publisher.hub.repo(REPO).discussion(1)["status"] == "merged"
    assert flags(publisher) == {third.tag: "current", second.tag: "candidate", first.tag: ""}


def test_back_and_forth_byte_by_byte(publisher: Publisher, three: tuple[Release, Release, Release]) -> None:
    for release in three:
        publisher.publish(release)
    sent = publisher.sent()
    for number in (0, 2, 1):
        rollback(publisher, three[number].tag)
        assert publisher.files() == three[number].files.keys()
    assert publisher.sent() == sent
    titles = [f"Roll back to {three[number].tag}" for number in (1, 2, 0)]
    assert publisher.history()[:3] == titles
    assert rollback(publisher, three[1].tag) == []
    assert publisher.history()[:3] == titles, "it is the current one already"


@pytest.mark.parametrize(
    ("method", "path", "error", "said"),
    [
        pytest.param("POST", "/commit/main", MovedError, "main has moved since", id="before the commit"),
        pytest.param("GET", "/tree/main", StageError, "main has not become .*: config.json differs", id="after"),
    ],
)
def test_a_main_that_moves_meanwhile_is_not_overwritten(
    publisher: Publisher,
    three: tuple[Release, Release, Release],
    method: str,
    path: str,
    error: type[Exception],
    said: str,
) -> None:
    from huggingface_hub import CommitOperationDelete

    first, second, _ = three
    publisher.publish(first)
    publisher.publish(second)
    hold = threading.Event()
    fault = Fault(method, path, hold=hold)
    publisher.hub.faults.append(fault)
    with ThreadPoolExecutor(1) as pool:
        rolled = pool.submit(rollback, publisher, first.tag)
        try:
            assert fault.reached.wait(30)
            edit = CommitOperationDelete("config.json")
            publisher.api.create_commit(REPO, [edit], commit_message="Meanwhile")
        finally:
            hold.set()
        with pytest.raises(error, match=said):
            rolled.result(30)
    assert publisher.history()[0] == "Meanwhile"
    rollback(publisher, first.tag)
    assert publisher.files() == first.files.keys()


def test_an_answer_that_got_lost_is_no_failure(publisher: Publisher, three: tuple[Release, Release, Release]) -> None:
    first, second, third = three
    publisher.publish(first)
    publisher.publish(second)
    publisher.hub.faults.append(Fault("POST", "/commit/main", lost=True))
    rollback(publisher, first.tag)
    assert publisher.history()[:2] == [f"Roll back to {first.tag}", f"{second.tag}: the model two"]
    publisher.publish(third, candidate=True, **BY_REQUEST)
    publisher.hub.faults.append(Fault("POST", "/merge", lost=True))
    promote(publisher)
    publisher.hub.faults.append(Fault("DELETE", "/tag/", lost=True))
    publisher.target().prune(keep=2, dry_run=False, progress=Told())
    assert flags(publisher) == {third.tag: "current", second.tag: ""}
