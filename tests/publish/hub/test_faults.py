"""Networks break, servers are busy, publishers are killed, and others write at the same time."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import get_session

from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.publish.hub.client import HubClient, MovedError, RefusedError, connect, redact
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.hub.repository import Repository
from quantmint.pipeline.publish.release import Release
from tests.hub.standin import Fault
from tests.publish.hub.conftest import REPO, Publisher

MakeRelease = Callable[..., Release]
WAYS = ("commit", "candidate", "pull-request")


class _KilledError(BaseException):
    """What a kill is to the code that it meets: nothing catches it."""


@contextmanager
def killed_after(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The request of that number is the last that is sent, and nobody sees its answer; the value names them all."""
    seen: list[str] = []
    library = type(get_session())  # of httpx, or of httpx2
    plain = library.send

    def send(client: Any, request: Any, **more: Any) -> Any:
        seen.append(f"{request.method} {re.sub('[0-9a-f]{40,}', '', request.url.path)}")
        answer = plain(client, request, **more)
        if len(seen) == number:
            raise _KilledError
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(library, "send", send)
        yield seen


def go(publisher: Publisher, release: Release, way: str, repo: str) -> None:
    """Publish in one of the ways to a repository of this name."""
    more: dict[str, Any] = {"gated": "auto", "collection": repo[7:], "via": way} if way == "pull-request" else {}
    publisher.publish(release, candidate=way == "candidate", repo=repo, **more)


def require_finished(publisher: Publisher, release: Release, way: str, repo: str) -> None:
    """The whole release, once."""
    branch = "candidate" if way == "candidate" else "main"
    assert publisher.files(release.tag, repo) == publisher.files(branch, repo) == release.files.keys()
    titles = publisher.history(branch, repo)
    assert [title.split(":")[0] for title in titles] == [release.tag, "initial commit"]
    if way == "pull-request":
        assert publisher.api.model_info(repo).gated == "auto"
        assert [one.status for one in publisher.api.get_repo_discussions(repo)] == ["merged"]
        found = [one for one in publisher.api.list_collections(owner="my-org") if one.title == repo[7:]]
        assert [[item.item_id for item in one.items] for one in found] == [[repo]]


@pytest.mark.parametrize("way", WAYS)
def test_killed_after_any_request_the_same_command_goes_on(
    publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(publisher.hub, "page", 99)
    release = make_release("one")
    go(publisher, release, way, "my-org/first")  # what the library asks once a process
    with killed_after(0, monkeypatch) as requests:
        go(publisher, release, way, "my-org/whole")
    written = [number for number, one in enumerate(requests, 1) if not one.startswith(("GET", "HEAD"))]
    assert len(written) > 5
    for number in written:
        repo = f"my-org/killed-{number}"
        with killed_after(number, monkeypatch), pytest.raises(_KilledError):
            go(publisher, release, way, repo)
        go(publisher, release, way, repo)
        require_finished(publisher, release, way, repo)


def test_killed_within_the_upload_finished_shards_are_not_sent_again(
    publisher: Publisher, make_release: MakeRelease, forked: Callable[[Callable[[], None]], int]
) -> None:
    shards = {f"model-{number}.safetensors": f"shard {number}".encode() * 999 for number in range(4)}
    release = make_release("one", files=shards)
    fault = Fault("PUT", "/storage/", skip=2, hold=threading.Event(), drop=0)
    publisher.hub.faults.append(fault)
    child = forked(lambda: publisher.publish(release) and None)
    assert fault.reached.wait(60)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert fault.hold is not None
    fault.hold.set()
    assert len(publisher.sent()) == 2
    assert publisher.history() == ["initial commit"]
    publisher.publish(release)
    assert sorted(publisher.sent()) == sorted(
        file.sha256 for name, file in release.files.items() if name.endswith(".safetensors")
    ), "each once"
    assert publisher.files() == release.files.keys()


@pytest.mark.parametrize(
    "fault", [Fault("PUT", "/storage/", drop=100), Fault("PUT", "/storage/", status=500), Fault("PUT", "/", lost=True)]
)
def test_a_shard_is_sent_again(publisher: Publisher, make_release: MakeRelease, fault: Fault) -> None:
    publisher.hub.faults.append(fault)
    release = make_release("one")
    publisher.publish(release)
    assert publisher.files() == release.files.keys()
    assert len(publisher.hub.sent("PUT", "/storage/")) == 2
    assert publisher.told.bars == [[release.size, release.size]], "what is sent twice counts once"
    assert not any("signature=" in line for line in publisher.told.lines), "nobody may use the signed address"


def test_how_long_is_waited_and_what_is_told(publisher: Publisher, make_release: MakeRelease) -> None:
    publisher.hub.faults += [
        Fault("POST", "/commit/", status=429, retry_after=7),
        Fault("POST", "/commit/", status=503, times=2),
        Fault("POST", "/tag/", drop=0),
    ]
    publisher.publish(make_release("one"))
    asked, second, third, fourth = publisher.waits
    assert asked == 8
    assert 2 <= second <= 5
    assert 4 <= third <= 9
    assert 2 <= fourth <= 3
    told = [line for line in publisher.told.lines if "try" in line]
    assert told[0].strip() == f"warning: {REPO}: commit to main: 429: The stand-in was told to fail.; try 2 of 6 in 8 s"
    assert len(told) == 4
    assert publisher.history()[1:] == ["initial commit"]


def test_what_is_refused_is_asked_once(publisher: Publisher, make_release: MakeRelease) -> None:
    for status in (400, 403, 409, 413):
        publisher.hub.faults.append(Fault("POST", "/commit/", status=status))
        with pytest.raises(RefusedError, match=f"cannot commit to main: {status}"):
            publisher.publish(make_release("one"))
    assert len(publisher.hub.sent("POST", "/commit/")) == 4
    assert publisher.waits == []


def test_secrets_are_cut_out_of_messages(publisher: Publisher) -> None:
    text = f"Bearer {publisher.hub.token} at https://me:word@s3.example/a/b?X-Amz-Signature=abc&x=1 failed"
    assert redact(text) == "Bearer [secret] at https://s3.example/a/b failed"
    with pytest.raises(RefusedError) as raised:
        connect(REPO).call("try", lambda: (_ for _ in ()).throw(ValueError(text)))
    assert str(raised.value) == f"{REPO}: cannot try: Bearer [secret] at https://s3.example/a/b failed"
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("branch", ["main", "candidate"])
def test_a_branch_that_moved_is_not_overwritten(publisher: Publisher, make_release: MakeRelease, branch: str) -> None:
    first, second = make_release("one"), make_release("two", day=22)
    candidate = branch == "candidate"
    publisher.publish(first, candidate=candidate)
    fault = Fault("POST", f"/commit/{branch}", hold=threading.Event())
    assert fault.hold is not None
    publisher.hub.faults.append(fault)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publisher.publish, second, candidate=candidate)
        assert fault.reached.wait(60)
        publisher.somebody_commits(revision=branch)
        fault.hold.set()
        with pytest.raises(MovedError, match=f"{branch} has moved since") as raised:
            running.result()
    assert "Nothing was overwritten" in str(raised.value)
    assert publisher.files(branch) == {*first.files, "NOTES.md"}
    assert second.tag not in publisher.tags()
    sent = publisher.sent()
    publisher.publish(second, candidate=candidate)
    assert publisher.files(branch) == second.files.keys()
    assert publisher.sent() == sent


@pytest.mark.parametrize("branch", ["main", "candidate"])
def test_two_publish_the_same_release_at_once(publisher: Publisher, make_release: MakeRelease, branch: str) -> None:
    release = make_release("one")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: publisher.publish(release, candidate=branch == "candidate"), range(2)))
    assert len({one.revision for one in found}) == 1
    assert publisher.history(branch) == [f"{release.tag}: the model one", "initial commit"]


def test_what_xet_is_given(publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own upload by Xet stands in here; its store is not spoken to, what it is called with is."""
    from huggingface_hub import _commit_api

    release, by_lfs = make_release("one"), _commit_api._upload_files
    shard = release.files["model.safetensors"].path
    given: list[str] = []

    def by_xet(*, additions: list[Any], create_pr: bool, **more: Any) -> None:
        for addition in additions:
            assert not addition.upload_info.is_hashed, "it is hashed while it is sent"
            given.append(addition.path_or_fileobj)
            addition.upload_info.sha256 = hashlib.sha256(Path(addition.path_or_fileobj).read_bytes()).digest()
        with monkeypatch.context() as without:
            without.setattr(_commit_api, "is_xet_available", lambda: False)
            by_lfs(additions=additions, create_pr=create_pr, **more)

    monkeypatch.setattr(_commit_api, "is_xet_available", lambda: True)
    monkeypatch.setattr(_commit_api, "_upload_xet_files", by_xet)
    whole = shard.read_bytes()
    shard.write_bytes(b"x" * len(whole))
    with pytest.raises(StageError, match=r"model\.safetensors is not what was judged"):
        publisher.publish(release)
    assert publisher.history() == ["initial commit"]
    shard.write_bytes(whole)
    publisher.publish(release)
    assert given == [str(shard)] * 2
    assert publisher.files() == release.files.keys()
    assert publisher.told.bars[-1] == [release.size, release.size]


def test_a_repository_that_another_publisher_makes_meanwhile_is_taken(
    publisher: Publisher, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when it was looked for, and is when it is to be made."""
    plain = HubDestination._create

    def create(place: HubDestination, client: HubClient) -> Repository:
        client.api.create_repo(place.repo, private=True)
        return plain(place, client)

    monkeypatch.setattr(HubDestination, "_create", create)
    release = make_release("one")
    publisher.publish(release)
    require_finished(publisher, release, "commit", REPO)
