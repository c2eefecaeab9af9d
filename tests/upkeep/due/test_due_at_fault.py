"""A place or a file that is wrong in a way that nobody thought of: one recipe's matter, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.manifest import FileDigest
from quantmint.pipeline.publish.release import MANIFEST
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.upkeep.due.due import plan_now
from tests.hub.standin import HubStandIn
from tests.publish.conftest import Bucket
from tests.upkeep.due.world import World


def test_a_fault_of_ours_stops_no_other_recipe(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(loaded: LoadedRecipe, *arguments: object, **options: object) -> object:
        if loaded.recipe.name == "r":
            raise KeyError("settings")
        return plan_now(loaded, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("quantmint.pipeline.upkeep.due.due.plan_now", faulty)
    world.recipe("good")
    broken, good = world.look("r.yaml", "good.yaml")
    assert (broken.name, broken.state, good.state) == ("r", "broken", "due")
    assert "cannot be looked at: KeyError: 'settings'" in broken.reason


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda release: (release / MANIFEST).write_text("{"),
    "other bytes": lambda release: (release / MANIFEST).write_bytes((release / MANIFEST).read_bytes() + b" "),
    "no manifest": lambda release: (release / MANIFEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_release_is_found(world: World, damage: str) -> None:
    """Its place answers: that is something else than a network that is away, and hides behind no other release."""
    world.release()
    world.recipe(gate={"accuracy": {"margin": 0.03}})
    tag = world.release(hour=13)
    DAMAGES[damage](world.folder / "published" / ".releases" / "r" / tag)
    found = world.due()
    assert (found.state, found.release, found.verdict) == ("damaged", None, None)
    assert tag in found.reason
    assert found.unknown == (found.reason,)
    world.recipe(gate={"accuracy": {"margin": 0.02}})  # nobody can say whether that is another thing
    assert world.due().state == "damaged"


def test_a_shard_that_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(world.manifest(), files={"model.safetensors": FileDigest(5, "a" * 64)})
    monkeypatch.setattr(World, "manifest", lambda *_, **__: made)
    tag = world.release()
    assert world.due().reason.endswith(f"{tag} is damaged: model.safetensors: it is missing, expected 5 bytes")
    path = world.folder / "published" / ".releases" / "r" / tag / "model.safetensors"
    path.write_bytes(b"1234")
    assert world.due().reason.endswith("model.safetensors: found 4 bytes, expected 5 bytes")
    path.write_bytes(b"12345")
    assert world.due().state == "current"


@pytest.mark.parametrize("pointer", [False, True])
def test_a_damaged_release_in_a_bucket(world: World, bucket: Bucket, pointer: bool) -> None:
    world.recipe(publish={"folder": None, "storage": {"url": bucket.url, "endpoint": bucket.server.url}})
    tag = world.release(to=BucketDestination(bucket.url, "r", bucket.server.url))
    name = "current.json" if pointer else f"{tag}/{MANIFEST}"
    bucket.client("put_object", Key=f"models/r/{name}", Body=b"{}")
    found = world.due()
    assert found.state == "damaged"
    assert name in found.reason if pointer else f"{tag} is damaged" in found.reason


def test_a_release_on_the_hub_that_a_later_version_made(world: World, hub: HubStandIn) -> None:
    world.recipe(publish={"folder": None, "hub": {"repo": "my-org/r"}})
    world.on_hub(hub, "my-org/r")
    later = b'{"schema": 2}'
    mark = manifests.identity(later)[:8]
    commit = hub.put("my-org/r", {MANIFEST: later}, f"v20261121-{mark}: later")
    hub.repo("my-org/r").refs[f"refs/tags/v20261121-{mark}"] = commit
    assert world.due().state == "damaged"
    assert "found schema 2, this version of quantmint reads 1" in world.due().reason


@pytest.mark.parametrize("where", ["folder", "storage"])
def test_a_place_that_is_new(world: World, bucket: Bucket, where: str) -> None:
    """Where the store has nothing: else the stage publish is found to be missing there."""
    storage = BucketDestination(bucket.url, "r", bucket.server.url)
    publish = {"folder": "published", "storage": {"url": bucket.url, "endpoint": bucket.server.url}}
    world.release(to=storage if where == "folder" else None)
    world.recipe(publish=publish)
    found = world.due()
    place = str(Path("published/r").resolve()) if where == "folder" else storage.address
    assert (found.state, found.reason, found.changes) == ("due", f"nothing is in {place}", ())
    world.release(to=None if where == "folder" else storage)
    assert world.due().state == "current"


def test_a_bucket_that_somebody_emptied(world: World, bucket: Bucket) -> None:
    """A run finds everything made, and sends nothing: what helps is told, and nothing runs again and again."""
    world.recipe(publish={"folder": "published", "storage": {"url": bucket.url, "endpoint": bucket.server.url}})
    world.release()
    world.finished()
    found = world.due()
    assert found.state == "current"
    lacks = f"nothing is in {bucket.url}/r"
    assert found.reason == f"this store has made it: `quantmint publish r` publishes it ({lacks})"
