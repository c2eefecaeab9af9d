"""The Hub's stand-in, asked by nothing but the real client."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from tests.hub.standin import Fault, HubStandIn

REPO = "my-org/model"
WEIGHTS = os.urandom(2**20)
FILES = {"model.safetensors": WEIGHTS, "README.md": b"---\nlicense: mit\n---\n# M\n", "a/b/deep.json": b"\xff" * 130}


@pytest.fixture
def api(hub: HubStandIn) -> HfApi:
    """The client, and a repository that has one commit of its own."""
    client = HfApi(endpoint=hub.url, token=hub.token)
    client.create_repo(REPO)
    client.create_commit(REPO, added(FILES), commit_message="Files")
    return client


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's second try comes at once."""
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=lambda _: None))


def added(files: dict[str, bytes]) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(name, content) for name, content in files.items()]


def refused(status: int, ask: Callable[[], object]) -> str:
    with pytest.raises(HfHubHTTPError) as error:
        ask()
    assert error.value.response.status_code == status
    return str(error.value)


def test_what_went_up_comes_down(hub: HubStandIn, api: HfApi) -> None:
    folder = Path(snapshot_download(REPO))

    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert len(hub.sent("GET", "/tree/")) == 2, "the listing had pages"
    assert folder.name == api.model_info(REPO).sha == api.list_repo_commits(REPO)[0].commit_id


def test_a_listing_knows_files_and_folders(api: HfApi) -> None:
    found = {one.path for one in api.list_repo_tree(REPO, recursive=True)}
    assert found == {".gitattributes", "a/b", *FILES}
    (one,) = api.get_paths_info(REPO, ["model.safetensors", "absent"])
    assert one.size == one.lfs.size == len(WEIGHTS)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "absent")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="absent")


def test_a_dataset_is_listed_and_read_at_each_of_its_commits(hub: HubStandIn) -> None:
    client, files = HfApi(endpoint=hub.url, token=hub.token), {"data/train.jsonl": b"{}", "database.json": b"[]"}
    first = hub.put("datasets/my-org/set", files)
    second = hub.put("datasets/my-org/set", {"data/train.jsonl": b'{"text": "more"}'})

    found = {client.dataset_info("my-org/set", revision=name).sha for name in ("main", second)}
    assert (found, first != second) == ({second}, True)
    (listed,) = client.list_repo_tree("my-org/set", "data", repo_type="dataset")
    assert listed.path == "data/train.jsonl"
    with pytest.raises(EntryNotFoundError):
        list(client.list_repo_tree("my-org/set", "absent", repo_type="dataset"))
    read = [Path(hf_hub_download("my-org/set", listed.path, repo_type="dataset", revision=one)) for one in found]
    assert [path.read_bytes() for path in read] == [b'{"text": "more"}']
    with pytest.raises(RepositoryNotFoundError):
        client.model_info("my-org/set")


def test_a_stale_parent_is_refused(api: HfApi) -> None:
    parent = api.model_info(REPO).sha
    api.create_commit(REPO, added({"x": b"1"}), commit_message="first", parent_commit=parent)

    second = lambda: api.create_commit(REPO, added({"x": b"2"}), commit_message="second", parent_commit=parent)  # noqa: E731

    assert "A commit has happened since" in refused(412, second)
    assert Path(hf_hub_download(REPO, "x")).read_bytes() == b"1"


def test_files_are_copied_and_deleted_without_a_byte_sent(hub: HubStandIn, api: HfApi) -> None:
    api.create_tag(REPO, tag="v1")
    gone = [CommitOperationDelete(name) for name in FILES if name != "README.md"]
    api.create_commit(REPO, gone, commit_message="-")
    assert api.list_repo_files(REPO) == [".gitattributes", "README.md"]
    puts = len(hub.sent("PUT", ""))

    back = [CommitOperationCopy(name, name, src_revision="v1") for name in FILES if name != "README.md"]
    api.create_commit(REPO, back, commit_message="back")

    assert hub.repo(REPO).tree(hub.repo(REPO).find("main")) == hub.repo(REPO).tree(hub.repo(REPO).find("v1"))
    assert len(hub.sent("PUT", "")) == puts
    refused(404, lambda: api.create_commit(REPO, [CommitOperationDelete("absent")], commit_message="-"))


def test_tags_and_branches_come_and_go(api: HfApi) -> None:
    first = api.model_info(REPO).sha
    api.create_tag(REPO, tag="v1")
    api.create_branch(REPO, branch="candidate")
    api.create_commit(REPO, added({"x": b"1"}), commit_message="on the branch", revision="candidate")

    refs = api.list_repo_refs(REPO)
    branches = {one.name: one.target_commit for one in refs.branches}
    assert (branches["main"], [(one.name, one.target_commit) for one in refs.tags]) == (first, [("v1", first)])
    assert api.list_repo_commits(REPO, revision="candidate")[0].commit_id == branches["candidate"] != first
    refused(409, lambda: api.create_tag(REPO, tag="v1"))
    refused(409, lambda: api.create_branch(REPO, branch="candidate"))
    api.delete_tag(REPO, tag="v1")
    api.delete_branch(REPO, branch="candidate")
    refused(404, lambda: api.delete_tag(REPO, tag="v1"))
    assert ([one.name for one in api.list_repo_refs(REPO).branches], api.list_repo_refs(REPO).tags) == (["main"], [])


def test_a_pull_request_is_opened_talked_about_and_merged(api: HfApi) -> None:
    pull = api.create_commit(REPO, added({"x": b"1"}), commit_message="A change", create_pr=True)
    api.create_commit(REPO, added({"y": b"2"}), commit_message="More", revision=pull.pr_revision)
    api.create_commit(REPO, added({"z": b"3"}), commit_message="Meanwhile")

    (listed,) = api.get_repo_discussions(REPO, discussion_type="pull_request", discussion_status="open")
    found = api.get_discussion_details(REPO, listed.num)
    assert (found.status, found.target_branch, found.conflicting_files) == ("open", "refs/heads/main", [])
    assert "x" not in api.list_repo_files(REPO)
    assert set(api.list_repo_files(REPO, revision="refs/pr/1")) >= {"x", "y"}

    api.merge_pull_request(REPO, pull.pr_num)

    assert set(api.list_repo_files(REPO)) >= {"x", "y", "z"}
    merged = api.get_discussion_details(REPO, pull.pr_num)
    assert (merged.status, merged.merge_commit_oid) == ("merged", api.model_info(REPO).sha)
    refused(400, lambda: api.merge_pull_request(REPO, pull.pr_num))


def test_pull_requests_may_conflict_and_be_closed(api: HfApi) -> None:
    pull = api.create_commit(REPO, added({"x": b"1"}), commit_message="theirs", create_pr=True)
    api.create_commit(REPO, added({"x": b"2"}), commit_message="ours")
    assert api.get_discussion_details(REPO, pull.pr_num).conflicting_files == ["x"]
    refused(409, lambda: api.merge_pull_request(REPO, pull.pr_num))
    api.change_discussion_status(REPO, pull.pr_num, "closed", comment="not this way")
    assert api.get_discussion_details(REPO, pull.pr_num).status == "closed"
    assert list(api.get_repo_discussions(REPO, discussion_status="open")) == []
    api.change_discussion_status(REPO, pull.pr_num, "open")
    assert [one.num for one in api.get_repo_discussions(REPO, discussion_status="open")] == [1]


def test_the_header_of_a_shard_is_read_alone(hub: HubStandIn, api: HfApi) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [2**20], "data_offsets": [0, 2**20]}}).encode()
    shard = struct.pack("<Q", len(header)) + header + WEIGHTS
    api.create_commit(REPO, added({"model.safetensors": shard}), commit_message="weights")
    assert api.get_safetensors_metadata(REPO).files_metadata["model.safetensors"].tensors["w"].dtype == "U8"
    assert {one.status for one in hub.sent("GET", "/storage/")} == {206}


def test_what_is_there_is_not_sent_again(hub: HubStandIn, api: HfApi) -> None:
    assert [one.received for one in hub.sent("PUT", "/storage/")] == [len(WEIGHTS)]
    again = api.create_commit(REPO, added(FILES), commit_message="the same")
    api.create_commit(REPO, added({"other.safetensors": WEIGHTS}), commit_message="its content elsewhere")

    assert len(hub.sent("PUT", "/storage/")) == 1
    assert again.oid == api.list_repo_commits(REPO)[1].commit_id, "no commit without a change"


def test_large_files_go_up_in_parts(hub: HubStandIn, api: HfApi) -> None:
    hub.part = 300_000
    content = os.urandom(10**6)
    api.create_commit(REPO, added({"large.bin": content}), commit_message="large")

    assert sorted(one.received for one in hub.sent("PUT", "/storage-part/")) == [100_000, 300_000, 300_000, 300_000]
    assert Path(hf_hub_download(REPO, "large.bin")).read_bytes() == content


def test_other_bytes_than_announced_are_refused(hub: HubStandIn, api: HfApi) -> None:
    operation = CommitOperationAdd("other.bin", b"promised")
    operation.upload_info.sha256 = hashlib.sha256(b"something else").digest()
    with pytest.raises(RuntimeError, match=r"other.bin") as error:
        api.preupload_lfs_files(REPO, [operation])
    assert "does not match what was computed" in str(error.value.__cause__)
    pointer = {"path": "other.bin", "algo": "sha256", "oid": "0" * 64, "size": 8}
    lines = [{"key": "header", "value": {"summary": "s"}}, {"key": "lfsFile", "value": pointer}]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    answer = get_session().post(
        f"{hub.url}/api/models/{REPO}/commit/main", content=body, headers={"Authorization": f"Bearer {hub.token}"}
    )
    assert (answer.status_code, "does not exist" in answer.text) == (400, True)


def test_storage_takes_signed_links_and_no_tokens(hub: HubStandIn, api: HfApi) -> None:
    (path,) = {one.path for one in hub.sent("PUT", "/storage/")}
    link, bearer = hub.signed(path), {"Authorization": f"Bearer {hub.token}"}
    session = get_session()
    assert session.get(link).content == WEIGHTS
    assert [session.get(link, headers=bearer).status_code, session.get(hub.storage + path).status_code] == [400, 403]


def test_private_repositories_are_hidden_from_strangers(hub: HubStandIn, api: HfApi) -> None:
    api.update_repo_settings(REPO, private=True)

    for token, status in ((False, 401), (hub.new_token("fineGrained"), 404)):
        with pytest.raises(RepositoryNotFoundError) as error:
            api.model_info(REPO, token=token)
        assert error.value.response.status_code == status
    assert "Invalid credentials" in refused(401, lambda: api.model_info(REPO, token="hf_wrong"))
    assert api.model_info(REPO, token=hub.new_token("read")).private is True
    api.update_repo_settings(REPO, private=False, gated="auto")
    assert api.model_info(REPO, token=False).gated == "auto"


def test_a_token_does_what_it_may(hub: HubStandIn, api: HfApi) -> None:
    read, stranger = hub.new_token("read"), hub.new_token("fineGrained", **{"my-org": ["repo.content.read"]})
    writer = hub.new_token("fineGrained", **{"my-org": ["repo.write"]})
    for token in (read, stranger):
        refused(403, lambda token=token: api.create_commit(REPO, added({"x": b"1"}), commit_message="x", token=token))
        refused(403, lambda token=token: api.create_tag(REPO, tag="v1", token=token))
        refused(403, lambda token=token: api.create_repo("my-org/other", token=token))
    refused(403, lambda: api.create_repo("read-org/model"))
    refused(403, lambda: api.create_repo("quant/model", token=writer))
    api.create_repo("my-org/other", token=writer)
    refused(409, lambda: api.create_repo("my-org/other"))
    assert api.create_repo("my-org/other", exist_ok=True).repo_id == "my-org/other"

    assert [api.whoami(token=one)["auth"]["accessToken"]["role"] for one in (hub.token, read)] == ["write", "read"]
    (scope,) = api.whoami(token=writer)["auth"]["accessToken"]["fineGrained"]["scoped"]
    assert (scope["entity"]["name"], scope["permissions"]) == ("my-org", ["repo.write"])
    refused(401, lambda: api.whoami(token="hf_wrong"))


def test_a_collection_is_made_once_and_holds_a_model_once(api: HfApi) -> None:
    made = api.create_collection("Our FP8", namespace="my-org")
    assert api.create_collection("Our FP8", namespace="my-org", exists_ok=True).slug == made.slug
    api.add_collection_item(made.slug, REPO, "model")
    api.add_collection_item(made.slug, REPO, "model", exists_ok=True)

    (item,) = api.get_collection(made.slug).items
    assert item.item_id == REPO
    assert [one.slug for one in api.list_collections(owner="my-org")] == [made.slug]


def test_the_metadata_of_a_card_is_read(api: HfApi) -> None:
    with pytest.raises(ValueError, match="base_model"):
        api.create_commit(REPO, added({"README.md": b"---\nbase_model: no such thing\n---\n"}), commit_message="card")
    with pytest.raises(ValueError, match="Invalid metadata"):
        api.create_commit(REPO, added({"README.md": b"---\na: [\n---\n"}), commit_message="card")
    with pytest.warns(UserWarning, match="empty or missing yaml"):
        api.create_commit(REPO, added({"README.md": b"# no metadata"}), commit_message="card")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "/storage/", status=503),
        Fault("PUT", "/storage/", status=429, retry_after=0),
        Fault("PUT", "/storage/", drop=2**18),
        Fault("PUT", "/storage/", lost=True),
    ],
    ids=["503", "429", "dropped", "answer-lost"],
)
def test_the_client_gets_over_what_goes_wrong_in_an_upload(hub: HubStandIn, api: HfApi, fault: Fault) -> None:
    hub.faults.append(fault)
    content = os.urandom(2**20)
    api.create_commit(REPO, added({"x.safetensors": content}), commit_message="x")

    first, second = hub.sent("PUT", "/storage/")[1:]
    assert (first.status, first.received) == (fault.status or 0, fault.drop or 2**20)
    assert (second.status, second.received, fault.reached.is_set()) == (200, 2**20, True)
    assert Path(hf_hub_download(REPO, "x.safetensors")).read_bytes() == content


@pytest.mark.usefixtures("impatient")
def test_a_download_that_broke_goes_on_where_it_was(
    hub: HubStandIn, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.faults.append(Fault("GET", "/storage/", drop=2**19))
    assert Path(hf_hub_download(REPO, "model.safetensors")).read_bytes() == WEIGHTS
    assert [one.status for one in hub.sent("GET", "/storage/")] == [200, 206]


def test_a_commit_may_happen_without_an_answer(hub: HubStandIn, api: HfApi) -> None:
    hub.faults.append(Fault("POST", "/commit/", lost=True))
    with pytest.raises(Exception, match="disconnected"):
        api.create_commit(REPO, added({"x": b"1"}), commit_message="x")
    assert "x" in api.list_repo_files(REPO)
