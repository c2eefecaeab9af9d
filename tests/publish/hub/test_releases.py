"""Which release readers of a repository get, and going from one to another; against the stand-in of the Hub."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipeline.errors import StageError, UserError
from pipeline.progress import PlainReporter
from pipeline.publish.hub import releases
from pipeline.publish.hub.client import Client, MissingError, MovedError, connect
from tests.hub.standin import Fault, HubStandIn

REPO = "my-org/tiny"
MANIFESTS = {
    f"v2026112{day}-{hashlib.sha256(raw).hexdigest()[:8]}": raw
    for day, raw in ((day, f'{{"day": {day}}}'.encode()) for day in (1, 2, 3))
}
FIRST, SECOND, THIRD = MANIFESTS


class Told(PlainReporter):
    """Lines kept in a list."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _line(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Place:
    """A repository of the stand-in, as a publisher fills it."""

    hub: HubStandIn
    client: Client
    told: Told
    shards: dict[str, bytes] = field(default_factory=dict)

    def publish(self, tag: str, *, branch: str = "main", by_request: bool = False, base: str | None = None) -> str:
        """One commit whose tree is the release, and its tag; returns the commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = self.client.api
        if branch != "main":
            api.create_branch(REPO, branch=branch, exist_ok=True)
        shard = self.shards.setdefault(tag, f"weights of {tag} ".encode() * 100)
        files = {
            "README.md": f"---\nlicense: mit\n---\n{tag}".encode(),
            "quantmint.json": MANIFESTS[tag],
            "model.safetensors": shard,
            "config.json": b"{}",
            f"only-{tag}.txt": b"only here",
        }
        there = api.list_repo_files(REPO, revision=base or branch)
        gone = [name for name in there if name not in files and name != ".gitattributes"]
        made = api.create_commit(
            REPO,
            [
                *(CommitOperationAdd(name, data) for name, data in files.items()),
                *(CommitOperationDelete(name) for name in gone),
            ],
            commit_message=f"{tag}: the model {tag}",
            revision=branch,
            parent_commit=base,
            create_pr=by_request,
        )
        api.create_tag(REPO, tag=tag, revision=made.oid)
        return str(made.oid)

    def shown(self, revision: str = "main") -> dict[str, str]:
        """What readers get: names and what identifies each file's bytes."""
        repo = self.hub.repo(REPO)
        tree = repo.tree(repo.find(revision))
        return {name: entry["oid"] for name, entry in tree.items() if name != ".gitattributes"}

    def flags(self) -> dict[str, str]:
        return {
            found.tag: "current" if found.current else "candidate" if found.candidate else ""
            for found in releases.releases(self.client)
        }

    @property
    def history(self) -> list[str]:
        return [commit.title for commit in self.client.api.list_repo_commits(REPO)]

    @property
    def sent(self) -> int:
        """Shards that were sent so far."""
        return len(self.hub.sent("PUT", "/storage"))


@pytest.fixture
def place(hub: HubStandIn) -> Place:
    told = Told()
    client = connect(REPO, told, sleep=lambda seconds: None)
    client.api.create_repo(REPO, private=True)
    return Place(hub, client, told)


def test_the_list_says_which_one_readers_get(place: Place) -> None:
    assert releases.releases(place.client) == ()
    place.publish(FIRST)
    place.publish(SECOND)
    waiting = place.publish(THIRD, branch="candidate")
    place.client.api.create_tag(REPO, tag="a-tag-of-somebody")
    third, second, first = releases.releases(place.client)
    assert (third.tag, third.revision, third.current, third.candidate) == (THIRD, waiting, False, True)
    assert (second.tag, second.current, second.candidate) == (SECOND, True, False)
    assert (first.tag, first.current, first.candidate) == (FIRST, False, False)
    assert first.title == f"the model {FIRST}"
    assert first.created.endswith("+00:00")
    repo = place.hub.repo(REPO)
    tree = repo.tree(repo.find(FIRST))
    assert first.size == sum(entry["size"] for name, entry in tree.items() if name != ".gitattributes")


def test_a_repository_that_is_not_there(place: Place) -> None:
    with pytest.raises(MissingError, match="my-org/none: there is no such repository, or this token may not see it"):
        releases.releases(connect("my-org/none"))


def test_a_candidate_becomes_current_by_one_commit_that_sends_no_shard(place: Place) -> None:
    place.publish(FIRST)
    place.publish(SECOND, branch="candidate")
    sent, before = place.sent, place.history
    done = releases.promote(place.client, None, dry_run=False)
    assert place.shown() == place.shown(SECOND)
    assert f"only-{FIRST}.txt" not in place.shown()
    assert place.history == [f"Promote {SECOND}", *before]
    assert place.sent == sent
    assert {(one.verb, one.what.split()[0]) for one in done} >= {
        ("copy", "model.safetensors"), ("delete", f"only-{FIRST}.txt,"), ("delete", "branch"),
    }  # fmt: skip
    assert ("copy", "config.json") not in {(one.verb, one.what.split()[0]) for one in done}, "it is the same file"
    assert place.flags() == {FIRST: "", SECOND: "current"}
    assert "refs/heads/candidate" not in place.hub.repo(REPO).refs

    assert releases.promote(place.client, SECOND, dry_run=False) == ()
    assert place.history == [f"Promote {SECOND}", *before]


def test_the_first_release_of_all_may_be_a_candidate(place: Place) -> None:
    place.publish(FIRST, branch="candidate")
    assert place.flags() == {FIRST: "candidate"}
    releases.promote(place.client, FIRST, dry_run=False)
    assert place.flags() == {FIRST: "current"}


def test_a_pull_request_is_merged(place: Place) -> None:
    base = place.publish(FIRST)
    place.publish(SECOND, by_request=True, base=base)
    assert place.flags() == {FIRST: "current", SECOND: "candidate"}
    sent = place.sent
    done = releases.promote(place.client, None, dry_run=False)
    assert [(one.verb, one.what) for one in done] == [("merge", "pull request 1 into main")]
    assert place.hub.repo(REPO).discussion(1)["status"] == "merged"
    assert place.shown() == place.shown(SECOND)
    assert place.sent == sent
    assert place.flags() == {FIRST: "", SECOND: "current"}
    releases.rollback(place.client, FIRST, dry_run=False)
    assert place.flags() == {FIRST: "current", SECOND: ""}, "what was merged does not wait any more"


def test_a_pull_request_from_an_older_main_is_not_mixed_into_it(place: Place) -> None:
    base = place.publish(FIRST)
    place.publish(SECOND, by_request=True, base=base)
    place.publish(THIRD)
    done = releases.promote(place.client, SECOND, dry_run=False)
    assert [one.verb for one in done][-2:] == ["commit", "close"]
    assert place.hub.repo(REPO).discussion(1)["status"] == "closed"
    assert place.shown() == place.shown(SECOND), f"merged, it would have kept only-{THIRD}.txt"
    assert place.flags() == {FIRST: "", SECOND: "current", THIRD: ""}


def test_which_candidate_is_meant(place: Place) -> None:
    base = place.publish(FIRST)
    with pytest.raises(UserError, match="my-org/tiny has no candidate to promote"):
        releases.promote(place.client, None, dry_run=False)
    place.publish(SECOND, branch="candidate")
    place.publish(THIRD, by_request=True, base=base)
    with pytest.raises(UserError, match=f"has 2 candidates, expected the tag of one: .*{SECOND}"):
        releases.promote(place.client, None, dry_run=False)
    with pytest.raises(UserError, match=f'has no release v20261122-0000002 .did you mean "{SECOND}"'):
        releases.promote(place.client, "v20261122-0000002", dry_run=False)
    releases.promote(place.client, THIRD, dry_run=False)
    with pytest.raises(UserError, match=f"{FIRST} is an earlier release of my-org/tiny, expected a candidate") as told:
        releases.promote(place.client, FIRST, dry_run=False)
    assert f"quantmint rollback my-org/tiny {FIRST}" in str(told.value)


def test_back_and_forth_byte_by_byte(place: Place) -> None:
    for tag in (FIRST, SECOND, THIRD):
        place.publish(tag)
    sent = place.sent
    for tag in (FIRST, THIRD, SECOND):
        releases.rollback(place.client, tag, dry_run=False)
        assert place.shown() == place.shown(tag)
        assert place.flags() == {THIRD: "", SECOND: "", FIRST: "", tag: "current"}
    assert place.sent == sent
    titles = [f"Roll back to {tag}" for tag in (SECOND, THIRD, FIRST)]
    assert place.history[:3] == titles
    assert releases.rollback(place.client, SECOND, dry_run=False) == ()
    assert place.history[:3] == titles, "it is the current one already"


def test_what_a_rollback_is_refused_for(place: Place) -> None:
    place.publish(FIRST)
    place.publish(SECOND, branch="candidate")
    with pytest.raises(UserError, match=f"{SECOND} of my-org/tiny is a candidate that was never a release"):
        releases.rollback(place.client, SECOND, dry_run=False)
    with pytest.raises(UserError, match="has no release nonsense"):
        releases.rollback(place.client, "nonsense", dry_run=False)


def test_a_tag_that_was_moved_leads_nowhere(place: Place) -> None:
    """Whoever may write there can set a tag anew, on files that no gate judged."""
    place.publish(FIRST)
    place.publish(SECOND)
    other = place.client.api.upload_file(
        repo_id=REPO, path_or_fileobj=b'{"day": 9}', path_in_repo="quantmint.json", revision="main"
    )
    place.client.api.delete_tag(REPO, tag=FIRST)
    place.client.api.create_tag(REPO, tag=FIRST, revision=other.oid)
    releases.rollback(place.client, SECOND, dry_run=False)
    before = place.shown()
    for dry_run in (True, False):
        with pytest.raises(StageError, match=f"is not that of {FIRST}: the tag was moved"):
            releases.rollback(place.client, FIRST, dry_run=dry_run)
    assert place.shown() == before == place.shown(SECOND)


def test_a_dry_run_says_the_same_and_does_nothing(place: Place) -> None:
    place.publish(FIRST)
    place.publish(SECOND)
    place.publish(THIRD, branch="candidate")
    refs = dict(place.hub.repo(REPO).refs)
    calls: list[Callable[..., Any]] = [
        lambda **options: releases.rollback(place.client, FIRST, **options),
        lambda **options: releases.remove(place.client, [FIRST], **options),
        lambda **options: releases.promote(place.client, THIRD, **options),
    ]
    said = [call(dry_run=True) for call in calls]
    assert place.hub.repo(REPO).refs == refs
    assert all(said)
    assert [one.verb for one in said[2]][-2:] == ["commit", "delete"]
    assert releases.rollback(place.client, FIRST, dry_run=False) == said[0]


def test_what_was_edited_on_main_is_told_and_replaced(place: Place) -> None:
    from huggingface_hub import CommitOperationAdd

    place.publish(FIRST)
    place.publish(SECOND)
    edit = CommitOperationAdd("README.md", b"---\nlicense: mit\n---\nby hand")
    edited = place.client.api.create_commit(REPO, [edit], commit_message="By hand")
    releases.rollback(place.client, FIRST, dry_run=False)
    [line] = place.told.lines
    assert f"main was edited after {SECOND}: README.md" in line
    assert place.shown() == place.shown(FIRST)
    assert edited.oid in [commit.commit_id for commit in place.client.api.list_repo_commits(REPO)]


@pytest.mark.parametrize(
    ("method", "path", "error", "said"),
    [
        pytest.param("POST", "/commit/main", MovedError, "cannot give main the files of", id="before the commit"),
        pytest.param("GET", "/tree/main", StageError, f"main has not become {FIRST}: config.json differs", id="after"),
    ],
)
def test_a_main_that_moves_meanwhile_is_not_overwritten(
    place: Place, method: str, path: str, error: type[Exception], said: str
) -> None:
    from huggingface_hub import CommitOperationDelete

    place.publish(FIRST)
    place.publish(SECOND)
    hold = threading.Event()
    fault = Fault(method, path, hold=hold)
    place.hub.faults.append(fault)
    with ThreadPoolExecutor(1) as pool:
        rolled = pool.submit(releases.rollback, place.client, FIRST, dry_run=False)
        try:
            assert fault.reached.wait(30)
            edit = CommitOperationDelete("config.json")
            place.client.api.create_commit(REPO, [edit], commit_message="Meanwhile")
        finally:
            hold.set()
        with pytest.raises(error, match=said):
            rolled.result(30)
    assert place.history[0] == "Meanwhile"
    releases.rollback(place.client, FIRST, dry_run=False)
    assert place.shown() == place.shown(FIRST)


def test_an_answer_that_got_lost_is_no_failure(place: Place) -> None:
    place.publish(FIRST)
    second = place.publish(SECOND)
    place.hub.faults.append(Fault("POST", "/commit/main", lost=True))
    releases.rollback(place.client, FIRST, dry_run=False)
    assert place.history[:2] == [f"Roll back to {FIRST}", f"{SECOND}: the model {SECOND}"]

    head = place.hub.repo(REPO).find("main")
    assert head != second
    place.publish(THIRD, by_request=True, base=head)
    place.hub.faults.append(Fault("POST", "/merge", lost=True))
    releases.promote(place.client, None, dry_run=False)
    assert place.flags() == {FIRST: "", SECOND: "", THIRD: "current"}

    place.hub.faults.append(Fault("DELETE", "/tag/", lost=True))
    releases.remove(place.client, [FIRST], dry_run=False)
    assert place.flags() == {SECOND: "", THIRD: "current"}


def test_old_releases_go_and_nothing_else(place: Place) -> None:
    for tag in (FIRST, SECOND):
        place.publish(tag)
    place.publish(THIRD, branch="candidate")
    for tag, state in ((SECOND, "the current release"), (THIRD, "a candidate")):
        with pytest.raises(UserError, match=f"{tag} is {state} of my-org/tiny"):
            releases.remove(place.client, [FIRST, tag], dry_run=False)
    assert set(place.flags()) == {FIRST, SECOND, THIRD}, "one that is refused keeps all"
    [done] = releases.remove(place.client, [FIRST], dry_run=False)
    assert done.what.startswith(f"tag {FIRST}; the Hub keeps the files")
    assert place.flags() == {SECOND: "current", THIRD: "candidate"}
