"""A release by the name of where it is: a published folder that holds several, a bucket, a repository of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, Release, tag_of
from quantmint.pipeline.store.files import File
from tests.hub.standin import HubStandIn
from tests.publish.conftest import Bucket
from tests.publish.verify import honest
from tests.publish.verify.conftest import Quantmint
from tests.publish.verify.test_tampering import flip_a_byte, swapped_numbers

Keys = Callable[[str], tuple[Path, Path]]
REPO = "my-org/llama-ptpc"


def release_of(folder: Path) -> Release:
    """The release that lies in a folder, as the stages assemble it."""
    manifest = manifests.read(folder / MANIFEST)
    identity = manifests.identity((folder / MANIFEST).read_bytes())
    files = honest.held(folder)
    for name in (MANIFEST, SIGNATURE):
        if (folder / name).exists():
            files[name] = File(folder / name, (folder / name).stat().st_size, honest.sha256(folder / name))
    tag = tag_of(datetime.fromisoformat(manifest.created), identity)
    return Release(manifest.name, tag, identity, manifest.title, files)


@pytest.fixture
def published(hub: HubStandIn, signed: Path) -> Release:
    """The signed release, on the Hub."""
    release = release_of(signed)
    HubDestination(REPO).publish(release, candidate=False, progress=PlainReporter())
    hub.requests.clear()
    return release


def test_a_release_of_a_folder_by_its_tag(release: Path, quantmint: Quantmint, tmp_path: Path) -> None:
    first = release_of(release)
    target = FolderDestination(tmp_path / "published", "llama-ptpc")
    target.publish(first, candidate=False, progress=PlainReporter())
    honest.remanifest(release, title="again")
    second = release_of(release)
    target.publish(second, candidate=False, progress=PlainReporter())
    place = tmp_path / "published" / "llama-ptpc"
    for named, said in ((place, "again"), (f"{place}@{first.tag}", "llama in FP8")):
        told = quantmint("release", "verify", named, "--unsigned", "--json")
        assert told.code == 0, told.out
        assert told.json["checks"][0]["reason"].startswith(said)
    wrong = quantmint("release", "verify", f"{place}@v20260101-00000000")
    assert (wrong.code, "has no release v20260101-00000000" in wrong.err) == (2, True)


def test_another_release_under_a_tag(release: Path, quantmint: Quantmint, tmp_path: Path) -> None:
    """An older one, whole and signed by whom the reader trusts, in place of the one that he asks for."""
    first = release_of(release)
    target = FolderDestination(tmp_path / "published", "llama-ptpc")
    target.publish(first, candidate=False, progress=PlainReporter())
    honest.remanifest(release, title="again")
    second = release_of(release)
    target.publish(second, candidate=False, progress=PlainReporter())
    home = tmp_path / "published/.releases/llama-ptpc"
    shutil.rmtree(home / second.tag)
    (home / first.tag).rename(home / second.tag)
    told = quantmint("release", "verify", f"{target.address}@{second.tag}", "--unsigned", "--json")
    failing = [check for check in told.json["checks"] if check["outcome"] != "OK"]
    assert [check["name"] for check in failing] == ["manifest"]
    assert f"another release lies under {second.tag}" in failing[0]["reason"]


def test_a_repository_of_the_hub(published: Release, hub: HubStandIn, quantmint: Quantmint, keys: Keys) -> None:
    told = quantmint("release", "verify", REPO, "--key", keys("ours")[1], "--json")
    assert {check["name"]: check["reason"] for check in told.json["checks"] if check["outcome"] != "OK"} == {}
    assert told.json["checks"][0]["reason"].count(f"; {published.tag}; ") == 1, "which release that is"
    assert (told.code, told.json["place"]) == (0, REPO)
    tagged = quantmint("release", "verify", f"hf://{REPO}@{published.tag}", "--key", keys("ours")[1])
    assert tagged.code == 0
    none = quantmint("release", "verify", "my-org/nobody")
    assert (none.code, "no such repository" in none.err) == (2, True)


def test_a_key_that_is_none_is_found_before_anything_is_fetched(
    hub: HubStandIn, quantmint: Quantmint, tmp_path: Path
) -> None:
    other = tmp_path / "notes.pub"
    other.write_text("no key")
    told = quantmint("release", "verify", REPO, "--key", str(other))
    assert (told.code, "expected a public key" in told.err, hub.requests) == (2, True, [])


def test_what_was_changed_on_the_hub_is_named(
    published: Release, signed: Path, quantmint: Quantmint, keys: Keys
) -> None:
    """Somebody with the right to write puts another shard and another card there."""
    from huggingface_hub import HfApi

    flip_a_byte(signed)
    swapped_numbers(signed)
    for name in ("model.safetensors", "README.md"):
        HfApi().upload_file(path_or_fileobj=signed / name, path_in_repo=name, repo_id=REPO)
    told = quantmint("release", "verify", REPO, "--key", keys("ours")[1], "--json")
    checks = {check["name"]: check for check in told.json["checks"]}
    assert told.code == 1
    found = [checks["digests"]["reason"], *checks["digests"]["details"]]
    assert any(line.startswith("model.safetensors was changed") for line in found)
    assert any(line.startswith("README.md was changed") for line in found)
    assert "the card's numbers are not the gate's" in checks["card"]["reason"]
    assert checks["signature"]["outcome"] == checks["gate"]["outcome"] == "FAILS"


def test_a_bucket(
    signed: Path, bucket: Bucket, quantmint: Quantmint, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    release = release_of(signed)
    bucket.place("llama-ptpc").publish(release, candidate=False, progress=PlainReporter())
    place = f"{bucket.url}/llama-ptpc"
    told = quantmint("gate", place, "--json")
    assert (told.code, told.json["verdict"], told.json["differences"]) == (0, "PASS", [])
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert quantmint("release", "verify", f"{place}@{release.tag}", "--key", keys("ours")[1]).code == 0
    flip_a_byte(signed)
    body = (signed / "model.safetensors").read_bytes()
    bucket.client("put_object", Key=f"models/llama-ptpc/{release.tag}/model.safetensors", Body=body)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    told = quantmint("release", "verify", place, "--key", keys("ours")[1], "--json")
    assert told.code == 1
    assert "model.safetensors is not what the release says" in told.json["checks"][0]["reason"]


def test_the_gate_judges_what_lies_elsewhere_by_its_evidence(
    published: Release, hub: HubStandIn, quantmint: Quantmint, tmp_path: Path
) -> None:
    for subject in (REPO, f"hf://{REPO}@{published.tag}"):
        told = quantmint("gate", subject, "--json")
        assert (told.code, told.json["verdict"], told.json["differences"]) == (0, "PASS", [])
    assert [request.path for request in hub.requests if "safetensors" in request.path] == []
    none = quantmint("gate", "my-org/nobody", "--json")
    assert (none.code, "no such repository" in json.loads(none.out)["error"]) == (2, True)
