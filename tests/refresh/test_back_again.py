"""Inputs that moved there and back: a run gives readers what it made from them before, unless a person chose."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet.requests import Options, Request
from pipeline.fleet.round import run
from pipeline.publish.folder import FolderTarget
from pipeline.publish.hub.target import HubTarget
from pipeline.publish.storage import StorageTarget
from pipeline.publish.target import Target
from pipeline.refresh.back import made_before
from pipeline.refresh.due import Due
from pipeline.refresh.release import Released, Silent
from pipeline.refresh.state import RecipeState, read_state, write_state
from pipeline.store.runs import list_runs
from tests.hub.standin import Fault, HubStandIn
from tests.publish.conftest import Bucket
from tests.refresh.world import CONFIG, World

REPO, BASE = "my-org/r", "my-org/base"


@dataclass
class There:
    """A recipe that was released at X and then at Y; ``move`` brings its inputs to one of them again."""

    world: World
    target: Target
    move: Callable[[str], None]
    x: str
    y: str

    def due(self, at: str) -> Due:
        self.move(at)
        return self.world.due()

    def shown(self) -> str:
        (tag,) = (one.tag for one in self.target.releases() if one.current)
        return tag


def there_and(
    world: World, hub: HubStandIn, target: Target, publish: dict[str, Any], moves: str, also: Target | None = None
) -> There:
    hub.put(BASE, {"config.json": CONFIG})
    at = {"x": hub.repo(BASE).find("main"), "y": hub.put(BASE, {"README.md": b"Better words."})}

    def move(to: str) -> None:
        if moves == "base":
            hub.repo(BASE).refs["refs/heads/main"] = at[to]
        margin = 0.03 if (moves, to) == ("recipe", "y") else 0.02
        world.recipe(source={"repo": BASE}, publish=publish, gate={"accuracy": {"margin": margin}})

    tags = []
    for hour, to in ((12, "x"), (13, "y")):
        move(to)
        tags.append(world.release(to=target, hour=hour))
        assert also is None or world.release(to=also, hour=hour) == tags[-1]
        world.finished(tag=tags[-1])
        world.ran(exit_code=0, verdict="PASS")
        assert world.due().state == "current"
    return There(world, target, move, *tags)


@pytest.fixture(params=["folder", "hub", "storage"])
def there(request: pytest.FixtureRequest, world: World, hub: HubStandIn) -> There:
    target: Target
    publish: dict[str, Any]
    match request.param:
        case "folder":
            target, publish = FolderTarget(world.folder / "published", "r"), {"folder": "published"}
        case "hub":
            target, publish = HubTarget(REPO), {"folder": None, "hub": {"repo": REPO}}
        case _:
            bucket: Bucket = request.getfixturevalue("bucket")
            target = StorageTarget(bucket.url, "r", bucket.server.url)
            publish = {"folder": None, "storage": {"url": bucket.url, "endpoint": bucket.server.url}}
    return there_and(world, hub, target, publish, "recipe" if request.param == "storage" else "base")


def test_there_and_back_and_there_again(there: There) -> None:
    for at, tag in (("x", there.x), ("y", there.y), ("x", there.x)):
        found = there.due(at)
        assert (found.state, found.brings_back) == ("due", tag)
        assert found.reason.endswith(f"; {tag} was made from these inputs, and is what readers get again")
        assert [key for key, state in found.stages if state == "rerun"] == ["publish"]
        assert there.target.bring_back(tag, dry_run=False, progress=Silent())
        again = there.world.due()
        assert (again.state, again.reason, again.brings_back) == ("current", "nothing changed", None)
        assert again.release is not None
        assert (again.release.tag, again.release.shown) == (tag, tag)


def test_what_a_person_went_back_from_stays_so(there: There) -> None:
    there.target.rollback(there.x, dry_run=False, progress=Silent())
    assert there.due("y").reason == f"nothing changed; readers get {there.x}"
    assert (there.due("x").state, there.due("x").reason) == ("current", "nothing changed")
    assert there.due("y").state == "current"


def test_what_a_person_chose_holds_it_back(there: There) -> None:
    for tag in (there.x, there.y):
        there.target.rollback(tag, dry_run=False, progress=Silent())
    found = there.due("x")
    assert (found.state, found.brings_back) == ("current", None)
    assert found.reason.startswith(f"held back: these inputs made {there.x}, from which somebody went back")
    assert f"`quantmint rollback {there.target.place} {there.x}`" in found.reason


@pytest.mark.parametrize("lost", ["nothing", "store"])
def test_what_a_person_went_back_from_stays_so_after_another_release(there: There, lost: str) -> None:
    """Also where everything would have to be made again: it would be the same."""
    there.target.rollback(there.x, dry_run=False, progress=Silent())
    there.move("x")
    there.world.release(to=there.target, hour=14)
    there.world.ran(exit_code=0, verdict="PASS")
    if lost == "store":
        shutil.rmtree(there.world.store.root)
    found = there.due("y")
    assert (found.state, found.brings_back) == ("current", None)
    assert found.reason.startswith(f"held back: these inputs made {there.y}, from which somebody went back")


@pytest.mark.parametrize("again", [False, True])
def test_what_a_person_went_back_from_and_removed_is_not_published_anew(
    world: World, hub: HubStandIn, again: bool
) -> None:
    target = FolderTarget(world.folder / "published", "r")
    there = there_and(world, hub, target, {"folder": "published"}, "recipe")
    target.rollback(there.x, dry_run=False, progress=Silent())
    if again:
        there.move("x")
        world.release(hour=14)
    shutil.rmtree(world.folder / "published" / ".releases" / "r" / there.y)
    found = there.due("y")
    assert (found.state, found.brings_back) == ("current", None)
    assert found.reason.startswith(f"held back: these inputs made {there.y}, from which somebody went back")


def test_nothing_is_brought_back_while_a_place_does_not_answer(world: World, hub: HubStandIn) -> None:
    """A person may have chosen there."""
    target = FolderTarget(world.folder / "published", "r")
    there = there_and(world, hub, target, {"folder": "published", "hub": {"repo": REPO}}, "recipe", HubTarget(REPO))
    assert there.due("x").brings_back == there.x
    hub.faults.append(Fault("GET", f"/api/models/{REPO}/refs", status=500, times=9))
    found = there.world.due()
    assert (found.state, found.brings_back) == ("unknown", None)


def test_two_editions_over_one_store_do_not_take_turns(world: World, hub: HubStandIn) -> None:
    target = FolderTarget(world.folder / "published", "r")
    there = there_and(world, hub, target, {"folder": "published"}, "recipe")
    there.move("x")
    for file, state in (("r.yaml", "due"), ("elsewhere.yaml", "current")):
        write_state(world.store.root, RecipeState(name="r", file=str(world.folder / file)))
        assert world.due().state == state


def test_what_another_store_published_stays(world: World, hub: HubStandIn) -> None:
    """Two checkouts of a recipe that differ, each with a store of its own: they would take turns for ever."""
    target = FolderTarget(world.folder / "published", "r")
    there = there_and(world, hub, target, {"folder": "published"}, "recipe")
    list_runs(world.store.root)[0].path.unlink()  # that of Y
    found = there.due("x")
    assert (found.state, found.brings_back) == ("current", None)
    assert found.reason.startswith(f"held back: readers get {there.y}, which a run of another store published; `quant")


def test_an_edit_that_was_taken_back_on_the_hub(world: World, hub: HubStandIn) -> None:
    there = there_and(world, hub, HubTarget(REPO), {"folder": None, "hub": {"repo": REPO}}, "recipe")
    assert there.due("x").brings_back == there.x
    hub.put(REPO, {"NOTES.md": b"by hand"}, "Add notes")
    assert there.due("x").brings_back == there.x  # who edits a page chooses no release
    raw = hub.repo(REPO).objects[hub.repo(REPO).tree(hub.repo(REPO).find(there.x))["quantmint.json"]["oid"]]
    hub.put(REPO, {"quantmint.json": raw}, "Revert")
    assert (there.due("x").state, there.due("y").state) == ("current", "current")  # by hand, and for a person


def test_what_somebody_left_between_is_finished(there: There) -> None:
    """Killed when the entry was put aside and readers had nothing yet: an ordinary run publishes, and brings back."""
    there.move("x")
    _, plan = there.world.plan()
    (publish,) = (planned for planned in plan if planned.key == "publish")
    entry = there.world.store.find("publish", publish.fingerprint)
    assert entry is not None
    there.world.store.retire(entry)
    found = there.world.due()
    assert (found.state, dict(found.stages)["publish"]) == ("due", "rerun")
    there.target.bring_back(there.x, dry_run=False, progress=Silent())  # as the stage does, and killed again after it
    found = there.world.due()
    assert (found.state, found.reason) == ("due", f"{there.x} is not in all places of the recipe")
    there.world.finished(tag=there.x)
    assert there.world.due().state == "current"


CHILD = """
import json, sys
open("asked.json", "w").write(json.dumps(sys.argv[1:]))
print(json.dumps({"verdict": "PASS", "published": []}))
"""


def test_a_round_makes_the_stage_publish_again_and_comes_to_rest(world: World, hub: HubStandIn) -> None:
    target = FolderTarget(world.folder / "published", "r")
    there = there_and(world, hub, target, {"folder": "published"}, "recipe")
    there.move("x")
    options = Options(store=world.store.root, command=(sys.executable, "-S", "-c", CHILD))

    def once() -> list[tuple[str, str]]:
        summary = run([Request("r.yaml")], options, on_event=lambda _: None, look=lambda names: world.look(*names))
        return [(ended.state, ended.reason) for ended in summary.ended]

    assert once() == [("ran", "")]
    asked = json.loads(Path("asked.json").read_text())
    assert [asked[place + 1] for place, word in enumerate(asked) if word == "--redo"] == ["publish"]
    target.bring_back(there.x, dry_run=False, progress=Silent())
    Path("asked.json").unlink()
    assert read_state(world.store.root, "r", warn=world.told.append).file == str(world.folder / "r.yaml")
    assert once() == [("current", "nothing changed")]
    assert not Path("asked.json").exists()


def test_versions_that_went_back_are_no_reason(world: World) -> None:
    """Two machines that differ in them would take turns for ever."""
    tag = world.release()
    one = Released("published/r", tag, world.manifest(), shown=tag, by_run=True)
    for causes in ({"toolchain"}, {"serving"}, {"toolchain", "serving"}):
        state, reason, back = made_before("r", "v1", [one], (), causes, "torch 2 -> 1", made={tag}, candidate=False)
        assert (state, back) == ("current", None)
        assert reason == "this store has made it: `quantmint publish r` brings v1 back (torch 2 -> 1)"
    assert made_before("r", "v1", [one], (), {"base", "toolchain"}, "", made={tag}, candidate=False)[2] == "v1"
    assert made_before("r", "v1", [one], (), {"base"}, "", made={tag}, candidate=True)[2] is None
    waits = Released("published/r", tag, world.manifest(), shown=tag, by_run=True, candidates=frozenset({"v1"}))
    assert made_before("r", "v1", [waits], (), {"base"}, "x", made={tag}, candidate=False) == (
        "current", "v1 waits: `quantmint promote published/r v1` (x)", None,
    )  # fmt: skip


@pytest.mark.parametrize(("asked", "status"), [("refs", 429), ("commits/", 500), ("tree/", 429)])
def test_a_fault_of_the_hub_that_passes_is_no_damage_and_no_reason(
    world: World, hub: HubStandIn, asked: str, status: int
) -> None:
    there = there_and(world, hub, HubTarget(REPO), {"folder": None, "hub": {"repo": REPO}}, "recipe")
    hub.put(REPO, {"NOTES.md": b"by hand"}, "Add notes")  # so that the files are asked for too
    for log in list_runs(world.store.root):  # their packages are empty here, and would be read instead
        log.path.unlink()
    hub.faults.append(Fault("GET", f"{REPO}/{asked}", times=99, status=status))
    found = there.due("x")
    assert (found.state, found.brings_back) == ("unknown", None), found.reason
