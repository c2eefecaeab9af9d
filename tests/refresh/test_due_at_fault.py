"""A place or a file that is wrong in a way that nobody thought of: one recipe's matter, and no other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.publish.release import MANIFEST
from pipeline.publish.storage import StorageTarget
from tests.publish.conftest import Bucket
from tests.refresh.world import World


def test_a_release_that_somebody_edited_stops_no_other_recipe(world: World) -> None:
    tag = world.release()
    path = world.folder / "published" / ".releases" / "r" / tag / MANIFEST
    said = json.loads(path.read_bytes())
    said["stages"]["evaluate-candidate"]["payload"] = {"version": 1}
    path.write_text(json.dumps(said))
    world.recipe("good")
    edited, good = world.look("r.yaml", "good.yaml")
    assert (edited.name, edited.state, good.state) == ("r", "broken", "due")
    assert "cannot be looked at: KeyError: 'settings'" in edited.reason


@pytest.mark.parametrize("where", ["folder", "storage"])
def test_a_place_that_is_new(world: World, bucket: Bucket, where: str) -> None:
    """Where the store has nothing: else the stage publish is found to be missing there."""
    storage = StorageTarget(bucket.url, "r", bucket.server.url)
    publish = {"folder": "published", "storage": {"url": bucket.url, "endpoint": bucket.server.url}}
    world.release(to=storage if where == "folder" else None)
    world.recipe(publish=publish)
    found = world.due()
    place = str(Path("published/r").resolve()) if where == "folder" else storage.place
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
