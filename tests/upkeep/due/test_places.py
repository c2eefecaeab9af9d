"""Where a release lies, where its inputs come from, and what is made of it when one of them does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import MANIFEST
from quantmint.pipeline.upkeep.due.answers import ask_all
from tests.hub.standin import Fault, HubStandIn
from tests.publish.conftest import Bucket
from tests.upkeep.due.world import CONFIG, CORE, RECIPE, SILENT, World

REPO, BASE = "my-org/r", "my-org/base"
FROM_HUB = {"source": {"repo": BASE}, "publish": {"folder": None, "hub": {"repo": REPO}}}


@pytest.fixture
def online(world: World, hub: HubStandIn) -> World:
    """A recipe whose model is on the Hub, and which is released there."""
    hub.put(BASE, {"config.json": CONFIG})
    world.recipe(**FROM_HUB)
    world.on_hub(hub, REPO)
    hub.requests.clear()
    return world


def away(hub: HubStandIn, path: str = "/", status: int = 503) -> None:
    hub.faults.append(Fault("GET", path, times=999, status=status))


def test_the_hub_is_asked_for_a_release_and_a_base(online: World, hub: HubStandIn) -> None:
    found = online.due()
    assert (found.state, found.unknown) == ("current", ())
    assert found.release is not None
    assert (found.release.place, found.release.shown) == (REPO, found.release.tag)
    assert not hub.sent("GET", r"safetensors|gate\.json")


def test_a_base_that_moved(online: World, hub: HubStandIn) -> None:
    before = hub.repo(BASE).find("main")
    after = hub.put(BASE, {"README.md": b"Better words."})
    found = online.due()
    assert (found.state, found.reason) == ("due", f"base {before[:7]} -> {after[:7]}")
    assert {change.cause for change in found.changes} == {"base"}
    assert online.due().state == "due"
    online.on_hub(hub, REPO, hour=13)
    assert online.due().state == "current"


@pytest.mark.parametrize("name", ["README.md", MANIFEST])
def test_a_tag_that_only_looks_like_a_releases_hides_none(online: World, hub: HubStandIn, name: str) -> None:
    """Somebody's own, of a day that is to come: nothing would be found released, or the Hub not be understood."""
    hub.repo(REPO).refs["refs/tags/v20991231-0a0b0c0d"] = hub.put(REPO, {name: b"{}"}, "of my own")
    found = online.due()
    assert (found.state, found.unknown) == ("current", ())


def test_a_calibration_set_that_moved(online: World, hub: HubStandIn) -> None:
    (online.folder / "sentences.yaml").write_text(
        "name: sentences\ndescription: Words.\nrepo: my-org/words\nrevision: main\nsplit: train\ntext: text\n"
    )
    before = hub.put("datasets/my-org/words", {"train.jsonl": b"{}"})
    online.on_hub(hub, REPO, hour=13)
    assert online.due().state == "current"
    after = hub.put("datasets/my-org/words", {"train.jsonl": b'{"text": "more"}'})
    # A run in this process has resolved the branch, and goes on with what it has found.
    found = online.due()
    assert (found.state, found.reason) == ("due", f"calibration data {before[:7]} -> {after[:7]}")
    assert {change.cause for change in found.changes} == {"dataset"}


def test_evaluation_data_that_moved(online: World, hub: HubStandIn) -> None:
    commits = {name: hub.put(f"datasets/{name}", {"test.jsonl": b"{}"}) for name in CORE}
    asked = {"evaluation": {"suite": "core"}, "target": {**RECIPE["target"], "max_model_len": 2048}}
    online.recipe(**FROM_HUB, **asked)
    online.on_hub(hub, REPO, hour=13)
    assert online.due().state == "current"
    after = hub.put("datasets/openai/gsm8k", {"test.jsonl": b'{"question": 1}'})
    found = online.due()
    before = commits["openai/gsm8k"]
    assert (found.state, found.reason) == ("due", f"data of gsm8k, openai/gsm8k {before[:7]} -> {after[:7]}")
    assert {change.cause for change in found.changes} == {"dataset"}
    assert {change.stage for change in found.changes} == {"evaluate-baseline", "evaluate-candidate", "control"}
    online.recipe(**FROM_HUB, **asked, refresh={"triggers": ["base", "recipe"]})
    assert online.due().state == "current"


@pytest.mark.parametrize("status", [503, 403])
def test_a_hub_that_does_not_answer_makes_nothing_due(online: World, hub: HubStandIn, status: int) -> None:
    online.due()
    away(hub, status=status)
    found = online.due()
    assert (found.state, found.release) == ("unknown", None)
    assert any(REPO in sentence for sentence in found.unknown)
    assert any(BASE in sentence for sentence in found.unknown)


def test_a_nearer_place_answers_while_the_hub_is_away(world: World, hub: HubStandIn) -> None:
    publish = {"folder": "published", "hub": {"repo": REPO}}
    world.recipe(publish=publish)
    tag = world.release(hour=13)
    away(hub)
    found = world.due()
    assert found.release is not None
    assert (found.state, found.release.tag, found.changes) == ("unknown", tag, ())
    world.recipe(publish=publish, gate={"accuracy": {"margin": 0.03}})
    found = world.due()
    assert (found.state, found.reason) == ("due", "recipe: gate.accuracy.margin 0.02 -> 0.03")
    assert found.unknown


def test_a_repository_that_is_not_there(world: World, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recipe(publish={"folder": None, "hub": {"repo": REPO}})
    assert (world.due().state, world.due().reason) == ("due", "never released")
    monkeypatch.delenv("HF_TOKEN")  # then it may be there, and shown to others only
    assert world.due().state == "unknown"


def test_a_base_that_is_not_there_is_a_broken_recipe(world: World, hub: HubStandIn) -> None:
    world.recipe(source={"repo": "my-org/gone"})
    found = world.due()
    assert found.state == "broken"
    assert "my-org/gone" in found.reason


def test_what_many_recipes_share_is_asked_once(online: World, hub: HubStandIn) -> None:
    names = [f"r{number}" for number in range(6)]
    for name in names:
        online.recipe(name, **FROM_HUB)
    online.look(*(f"{name}.yaml" for name in names))
    assert len(hub.sent("GET", f"/api/models/{BASE}")) == 1
    assert len(hub.sent("GET", f"/api/models/{REPO}/refs")) == 1


def test_a_bucket(world: World, bucket: Bucket) -> None:
    storage = {"url": bucket.url, "endpoint": bucket.server.url}
    world.recipe(publish={"folder": None, "storage": storage})
    assert (world.due().state, world.due().reason) == ("due", "never released")
    place = BucketDestination(bucket.url, "r", bucket.server.url)
    world.release(to=place)
    assert world.due().state == "current"
    world.recipe(publish={"folder": None, "storage": storage}, gate={"accuracy": {"margin": 0.03}})
    assert world.due().reason == "recipe: gate.accuracy.margin 0.02 -> 0.03"


def test_the_newest_of_several_places(world: World, bucket: Bucket) -> None:
    publish = {"folder": "published", "storage": {"url": bucket.url, "endpoint": bucket.server.url}}
    world.recipe(publish=publish)
    world.release()
    world.recipe(publish=publish, gate={"accuracy": {"margin": 0.03}})
    tag = world.release(to=BucketDestination(bucket.url, "r", bucket.server.url), hour=13)
    found = world.due()
    assert found.release is not None
    assert (found.state, found.release.tag, found.release.place) == ("current", tag, f"{bucket.url}/r")


@dataclass
class There:
    """A recipe that was released as it was first, and then as it was edited; ``move`` undoes the edit, or makes it."""

    world: World
    target: Destination
    move: Callable[[str], None]
    first: str
    edited: str


@pytest.fixture(params=["folder", "hub", "storage"])
def there(request: pytest.FixtureRequest, world: World, hub: HubStandIn) -> There:
    target: Destination
    publish: dict[str, Any]
    match request.param:
        case "folder":
            target, publish = FolderDestination(world.folder / "published", "r"), {"folder": "published"}
        case "hub":
            target, publish = HubDestination(REPO), {"folder": None, "hub": {"repo": REPO}}
        case _:
            bucket: Bucket = request.getfixturevalue("bucket")
            target = BucketDestination(bucket.url, "r", bucket.server.url)
            publish = {"folder": None, "storage": {"url": bucket.url, "endpoint": bucket.server.url}}

    def move(to: str) -> None:
        world.recipe(publish=publish, gate={"accuracy": {"margin": 0.03 if to == "edited" else 0.02}})

    tags = []
    for hour, to in ((12, "first"), (13, "edited")):
        move(to)
        tags.append(world.release(to=target, hour=hour))
        world.finished(tag=tags[-1])
        assert world.due().reason == "nothing changed"
    return There(world, target, move, *tags)


def test_an_edit_that_was_taken_back_has_its_release_already(there: There) -> None:
    there.move("first")
    found = there.world.due()
    command = f"`quantmint release rollback {there.target.address} {there.first}` gives them what these inputs made"
    assert (found.state, found.reason) == (
        "current", f"readers get {there.edited}; {command} (recipe: gate.accuracy.margin 0.03 -> 0.02)",
    )  # fmt: skip
    there.target.rollback(there.first, dry_run=False, progress=SILENT)
    found = there.world.due()
    assert found.state == "current"
    assert found.reason.startswith(f"readers get {there.first}, made from these inputs")


def test_a_rollback_makes_nothing_due(there: There) -> None:
    there.target.rollback(there.first, dry_run=False, progress=SILENT)
    found = there.world.due()
    command = f"`quantmint release rollback {there.target.address} {there.edited}` gives them what these inputs made"
    assert (found.state, found.reason) == ("current", f"nothing changed; readers get {there.first}; {command}")
    assert found.release is not None
    assert (found.release.tag, found.release.shown) == (there.edited, there.first)


def test_who_hangs_is_given_up_and_costs_the_others_nothing() -> None:
    hold = threading.Event()

    def fail() -> int:
        raise ValueError("no")

    questions: dict[str, Callable[[], object]] = {"good": lambda: 1, "bad": fail}
    found = ask_all({**questions, **{f"hangs {number}": hold.wait for number in range(40)}}, patience=0.2)
    hold.set()
    assert found.pop("good") == 1
    assert isinstance(found.pop("bad"), ValueError)
    assert len(found) == 40
    assert all(isinstance(answer, TimeoutError) for answer in found.values())


def test_all_are_asked_at_once() -> None:
    """Each waits until all are there: one after the other would never end."""
    together = threading.Barrier(8)
    found = ask_all({number: lambda: together.wait(timeout=30) for number in range(8)})
    assert {type(answer) for answer in found.values()} == {int}
