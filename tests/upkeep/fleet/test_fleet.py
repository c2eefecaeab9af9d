"""Seven recipes on tiny models: what moved is made anew and published, and nothing else is touched."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from tests.hub.standin import HubStandIn
from tests.processes import processes_naming
from tests.upkeep.fleet.world import FLEET, MXFP4, Ran, World, build, environment, made
from tests.warm.executable import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOUTH = {name for name, planned in FLEET.items() if planned.base == "south"}
SENTENCES = {"east-fp8kv"}
BROKEN, FAILING, SERVED_ANEW = "east-block", "north-fp8kv-strict", "north-block"
UNTOUCHED = FLEET.keys() - SOUTH - SENTENCES - {BROKEN, FAILING}
IMAGE = f"rocm/vllm@sha256:{'7' * 64}"


@dataclass(frozen=True)
class Round:
    """What was due, what a round did about it, and what of it is in the store and with the readers afterwards."""

    due: Ran
    ran: Ran
    runs: dict[str, list[dict[str, Any]]]
    before: dict[str, str]
    after: dict[str, str]

    @property
    def changes(self) -> dict[str, set[tuple[str, str]]]:
        """Each recipe's changes before the round: its state, with the cause."""
        found = {one["name"]: one for one in self.due.answer["recipes"]}
        return {name: {(one["state"], change["cause"]) for change in one["changes"]} for name, one in found.items()}

    @property
    def made(self) -> dict[str, set[str]]:
        """The stages that were made for each recipe that ran."""
        return {name: {key for run in runs for key in made(run)} for name, runs in self.runs.items()}


def new_round(world: World, *arguments: str, **variables: str) -> Round:
    before, known = world.releases(_released(world)), {run["started"] for runs in world.runs().values() for run in runs}
    due = world.run("due", *arguments, **variables)
    ran = world.run("requantize", "--due", "--jobs", "2", *arguments, **variables)
    began = {name: [run for run in runs if run["started"] not in known] for name, runs in world.runs().items()}
    runs = {name: found for name, found in began.items() if found}
    return Round(due, ran, runs, before, world.releases(_released(world)))


def _released(world: World) -> list[str]:
    there = {path.name for path in (world.home / "published").glob("[!.]*")}
    return [name for name in FLEET if name in there or f"my-org/{name}" in world.hub.repos]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("fleet")
    with HubStandIn() as hub, warm_python(home, environment(hub, home)) as python:
        yield build(home, hub, python)
    assert not processes_naming(str(home))


@pytest.fixture(scope="module")
def first(world: World) -> Round:
    return new_round(world)


@pytest.fixture(scope="module")
def moved(world: World, first: Round) -> Round:
    """A model and a data set move, one recipe is broken by its editor, another asks for too much."""
    assert first.ran.code == 0, first.ran.said
    world.move_base("south")
    world.move_sentences(64)
    world.write(FAILING, replace(FLEET[FAILING], quantization=MXFP4, calibration=None))
    with (world.home / "recipes" / f"{BROKEN}.yaml").open("a") as file:
        file.write("gate: [\n")
    return new_round(world)


@pytest.fixture(scope="module")
def second(world: World, moved: Round) -> Round:
    """The same once more: nobody did anything in between."""
    return new_round(world)


@pytest.fixture(scope="module")
def repaired(world: World, second: Round) -> Round:
    for name in (BROKEN, FAILING):
        world.write(name, FLEET[name])
    return new_round(world)


@pytest.fixture(scope="module")
def served_anew(world: World, repaired: Round) -> Round:
    return new_round(world, SERVED_ANEW, QUANTMINT_IMAGE=IMAGE)


def test_what_was_never_released_is_made_and_published(world: World, first: Round) -> None:
    assert (first.due.code, first.due.answer["due"], first.ran.code) == (10, len(FLEET), 0), first.ran.said
    assert {name: (one["state"], one["verdict"]) for name, one in first.ran.ended.items()} == dict.fromkeys(
        FLEET, ("ran", "PASS")
    )
    assert first.after.keys() == FLEET.keys()
    assert first.ran.said.index("north-fp8kv: started") < first.ran.said.index("east-block: started"), "priority"


def test_what_recipes_share_is_made_once(first: Round) -> None:
    counted = Counter(found for runs in first.runs.values() for run in runs for found in made(run).values())
    assert set(counted.values()) == {1}
    bases = {planned.base for planned in FLEET.values()}
    all_made = [key for runs in first.runs.values() for run in runs for key in made(run)]
    assert all_made.count("evaluate-baseline") == len(bases)
    assert all_made.count("quantize") == len({(one.base, str(one.quantization)) for one in FLEET.values()})


def test_due_says_what_has_moved(moved: Round) -> None:
    assert moved.due.code == 10
    assert moved.changes == {
        **{name: {("due", "base")} for name in SOUTH},
        **{name: {("due", "dataset")} for name in SENTENCES},
        **{name: set() for name in UNTOUCHED},
        BROKEN: set(),
        FAILING: {("due", "recipe")},
    }
    states = {one["name"]: one["state"] for one in moved.due.answer["recipes"]}
    assert {name for name, state in states.items() if state == "current"} == UNTOUCHED
    assert states[BROKEN] == "broken"


def test_exactly_what_is_due_runs(moved: Round) -> None:
    assert moved.runs.keys() == SOUTH | SENTENCES | {FAILING}
    assert all(len(runs) == 1 for runs in moved.runs.values())
    south = {key for name in SOUTH for key in moved.made[name]}
    candidate = {"quantize", "inspect", "serve-candidate", "canary-candidate", "evaluate-candidate"}
    releasing = {"gate", "report", "package", "publish"}
    assert south >= candidate | releasing | {"source", "serve-baseline", "canary-baseline", "evaluate-baseline"}
    sentences = {key for name in SENTENCES for key in moved.made[name]}
    assert sentences == candidate | releasing | {"calibrate"}, "the baseline did not move"
    assert not moved.made[FAILING] & {"source", "calibrate", "evaluate-baseline", "publish"}


def test_the_good_ones_are_published_and_the_others_stay(world: World, moved: Round) -> None:
    changed = {name for name in FLEET if moved.before[name] != moved.after[name]}
    assert changed == SOUTH | SENTENCES
    commit = world.hub.repo("my-org/south").find("main")
    assert {world.release(name)["base"]["commit"] for name in SOUTH} == {commit}


def test_the_summary_has_a_verdict_each_and_the_worst_exit_code(moved: Round) -> None:
    found = moved.ran.ended
    assert moved.ran.code == moved.ran.answer["exit_code"] == 2, moved.ran.said
    assert found.keys() == FLEET.keys()
    assert {(found[name]["state"], found[name]["verdict"]) for name in SOUTH | SENTENCES} == {("ran", "PASS")}
    assert {(found[name]["state"], found[name]["attempts"]) for name in UNTOUCHED} == {("current", 0)}
    assert (found[FAILING]["state"], found[FAILING]["verdict"], found[FAILING]["exit_code"]) == ("ran", "FAIL", 1)
    assert (found[BROKEN]["state"], found[BROKEN]["exit_code"]) == ("broken", 2)
    assert f"{BROKEN}.yaml:" in found[BROKEN]["reason"], "file and line"


def test_a_second_round_does_nothing(world: World, moved: Round) -> None:
    entries, runs, logs, asked = world.entries(), world.runs(), world.logs(), len(world.hub.requests)
    released = world.releases(FLEET)

    again = world.run("requantize", "--due", python=sys.executable)

    assert (world.entries(), world.runs(), world.logs(), world.releases(FLEET)) == (entries, runs, logs, released)
    assert {one["attempts"] for one in again.ended.values()} == {0}
    assert {request.method for request in world.hub.requests[asked:]} <= {"GET", "HEAD", "POST"}
    assert not [one for one in world.hub.requests[asked:] if one.method == "POST" and "/commit/" in one.path]


def test_what_was_judged_is_held_and_counts_as_it_was_judged(second: Round) -> None:
    assert (second.due.code, second.due.answer["due"], second.ran.code) == (2, 0, 2)
    assert second.runs == {}
    held = second.ran.ended[FAILING]
    assert (held["state"], held["verdict"], held["exit_code"]) == ("held", "FAIL", 1)


def test_what_is_as_it_was_released_needs_no_run(repaired: Round) -> None:
    assert (repaired.due.code, repaired.ran.code) == (0, 0)
    assert {one["state"] for one in repaired.ran.ended.values()} == {"current"}
    assert (repaired.runs, repaired.before) == ({}, repaired.after)


def test_another_image_is_judged_anew_and_quantizes_nothing(served_anew: Round) -> None:
    assert served_anew.changes == {SERVED_ANEW: {("due", "serving")}}
    assert (served_anew.ran.code, served_anew.runs.keys()) == (0, {SERVED_ANEW}), served_anew.ran.said
    found = served_anew.made[SERVED_ANEW]
    sides = ("baseline", "candidate")
    assert found == {f"{stage}-{side}" for stage in ("serve", "canary", "evaluate") for side in sides} | {
        "gate", "report", "package", "publish",
    }  # fmt: skip
    changed = {name for name in FLEET if served_anew.before[name] != served_anew.after[name]}
    assert changed == {SERVED_ANEW}


def test_no_round_leaves_a_lock_or_a_process(world: World, served_anew: Round) -> None:
    assert list(Path(world.store).rglob("*.lock*")) == []
    assert list(Path(world.store).glob("*/*.work")) == []
