"""What a person names, and which place that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.addresses import (
    open_destination,
    override_destinations,
    published_folder,
    recipe_destinations,
    serving_name,
)
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.recipe.sections import Publish


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def published(folder: str, name: str) -> None:
    (Path(folder) / ".releases" / name).mkdir(parents=True)


@pytest.mark.parametrize("text", ["published/llama", "published/llama/", "./published/llama"])
def test_a_published_folder(text: str) -> None:
    published("published", "llama")
    target = open_destination(text)
    assert isinstance(target, FolderDestination)
    assert target.address == str(Path.cwd() / "published" / "llama")


def test_a_repository() -> None:
    for text in ("my-org/Llama-3.3-70B", "hf://my-org/Llama-3.3-70B"):
        place = open_destination(text)
        assert isinstance(place, HubDestination)
        assert (place.address, place.section) == ("my-org/Llama-3.3-70B", None)


def test_a_folder_goes_before_a_repository() -> None:
    published("my-org", "llama")
    assert isinstance(open_destination("my-org/llama"), FolderDestination)
    assert isinstance(open_destination("hf://my-org/llama"), HubDestination)


@pytest.mark.parametrize("text", ["s3://bucket/models/llama", "s3://bucket/models/llama/", "gs://x/llama"])
def test_a_bucket(text: str) -> None:
    target = open_destination(text)
    assert isinstance(target, BucketDestination)
    assert target.address == text.rstrip("/")


@pytest.mark.parametrize(("text", "named"), [("s3://bucket/llama", "bucket"), ("my-org/llama", "hub.destination")])
def test_only_what_speaks_to_the_place_is_imported(text: str, named: str) -> None:
    opening = f"from quantmint.pipeline.publish.addresses import open_destination; open_destination({text!r})"
    code = f"import sys; {opening}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kinds = {"quantmint.pipeline.publish.bucket", "quantmint.pipeline.publish.hub.destination"}
    assert kinds & set(told.stdout.split()) == {f"quantmint.pipeline.publish.{named}"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("published/lama", r'nothing was published there \(did you mean "published/llama"\?\)'),
        ("mine/stuff", "mine/stuff: nothing was published there"),
        ("llama", "llama: nothing was published there; expected a published folder"),
        ("a b/c", "nothing was published there"),
        ("", "nothing was published there"),
        ("hf://llama", "expected .* or a repository"),
        ("https://huggingface.co/my-org/llama", "expected .* or a repository"),
        ("my-org/llama@main", "nothing was published there"),
        ("s3://bucket", "expected .*a bucket"),
        ("s3://user:word@bucket/llama", "expected .*a bucket"),
    ],
)
def test_what_is_no_place(text: str, said: str) -> None:
    published("published", "llama")
    Path("mine/stuff").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        open_destination(text)


def recipe(**section: Any) -> Any:
    return SimpleNamespace(name="llama", publish=Publish.model_validate({"folder": None, **section}))


HUB = {"repo": "my-org/llama", "gated": "manual"}
STORAGE = {"url": "s3://bucket/models/", "endpoint": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"folder": "published"}, "llama"),
        ({"folder": "published", "storage": STORAGE}, "s3://bucket/models/llama"),
        ({"folder": "published", "storage": STORAGE, "hub": HUB}, "my-org/llama"),
    ],
)
def test_what_readers_give_to_vllm(section: dict[str, Any], name: str) -> None:
    assert serving_name(recipe(**section)) == name


def test_the_places_of_a_recipe(tmp_path: Path) -> None:
    setting: Any = SimpleNamespace(recipe=recipe(folder="out", hub=HUB, storage=STORAGE), home=tmp_path)
    folder, storage, hub = recipe_destinations(setting.recipe, tmp_path)
    assert folder.address == str(tmp_path / "out" / "llama") == str(published_folder(setting.recipe, tmp_path))
    assert storage.address == "s3://bucket/models/llama"
    assert isinstance(hub, HubDestination)
    assert (hub.repo, hub.section) == ("my-org/llama", setting.recipe.publish.hub)
    setting.recipe = recipe(hub=HUB)
    assert [target.address for target in recipe_destinations(setting.recipe, tmp_path)] == ["my-org/llama"]
    assert published_folder(setting.recipe, tmp_path) is None


def test_other_places_than_the_recipe_names() -> None:
    section = recipe(folder="out", hub=HUB, storage=STORAGE, to="candidate", keep=2).publish
    assert override_destinations(section, {}) == section
    assert override_destinations(section, {"hub": None}, to="release") == section.model_copy(update={"to": "release"})
    there: Any = override_destinations(section, {"hub": "my-org/other", "folder": "mine"})
    assert (there.hub.repo, there.hub.gated, there.folder, there.storage) == ("my-org/other", "manual", "mine", None)
    assert (there.to, there.keep) == ("candidate", 2)
    stored: Any = override_destinations(section, {"storage": "s3://elsewhere/x"}).storage
    assert (stored.url, stored.endpoint) == ("s3://elsewhere/x", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hub": "llama"}, "--hub: found 'llama', expected org/name"),
        ({"storage": "bucket/x"}, "--storage: found 'bucket/x', expected a URL such as s3://"),
        ({"folder": ""}, "--folder: found '', expected the path of a folder"),
    ],
)
def test_what_is_no_other_place(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        override_destinations(recipe(folder="out").publish, given)


def test_a_copied_link_is_told_from_a_copied_release(tmp_path: Path) -> None:
    """`cp -r published/llama elsewhere` copies the link to the release, and not the release."""
    (tmp_path / "elsewhere").symlink_to(".releases/llama/v1")
    with pytest.raises(UserError, match=r"a link to \.releases/llama/v1, which is not there") as refused:
        open_destination(str(tmp_path / "elsewhere"))
    assert "cp -rL" in str(refused.value.hint)
