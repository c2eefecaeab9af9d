"""One thing is changed after a release, and what is found of the recipe is what a person would say."""

from __future__ import annotations

from typing import Any

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base import machine
from quantmint.pipeline.stages import evaluate, package, paired, quantize, report, stage
from quantmint.pipeline.upkeep.due.due import Due
from tests.upkeep.due.world import RECIPE, World

SERVED = ("serve-baseline", "canary-baseline", "serve-candidate", "canary-candidate")
MEASURED = ("evaluate-baseline", "control", "evaluate-candidate", "bench")
AFTER_SERVING = (*SERVED, *MEASURED, "gate", "report", "package", "publish")


def reruns(due: Due) -> tuple[str, ...]:
    return tuple(key for key, state in due.stages if state == "rerun")


def causes(due: Due) -> set[str]:
    return {change.cause for change in due.changes}


def upgraded(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    installed = machine.versions

    def now(*names: str) -> dict[str, str]:
        return {name: versions.get(name, version) for name, version in installed(*names).items()}

    for module in (stage, quantize, evaluate, paired, report, package):
        monkeypatch.setattr(module, "versions", now)


def test_never_released(world: World) -> None:
    found = world.due()
    assert (found.state, found.reason, found.release, causes(found)) == ("due", "never released", None, {"recipe"})
    assert set(dict(found.stages).values()) == {"rerun"}
    assert found.loaded is not None
    assert (found.name, found.recipe, found.loaded.recipe.name) == ("r", "r.yaml", "r")


def test_nothing_changed(world: World) -> None:
    tag = world.release()
    found = world.due()
    assert (found.state, found.reason, found.changes, found.unknown) == ("current", "nothing changed", (), ())
    assert found.release is not None
    assert (found.release.tag, found.release.shown) == (tag, tag)
    assert set(dict(found.stages).values()) == {"rerun"}  # this store has nothing of it, and needs nothing of it


def test_another_base(world: World) -> None:
    world.release()
    world.finished()
    assert not reruns(world.due())
    (world.folder / "model" / "tokenizer.json").write_text("{}")
    found = world.due()
    assert (found.state, causes(found)) == ("due", {"base"})
    assert found.reason.startswith("base ")
    assert "source" in reruns(found)


def test_other_calibration_texts(world: World) -> None:
    world.release()
    world.finished()
    (world.folder / "words.jsonl").write_text('{"text": "four"}\n')
    found = world.due()
    assert (found.state, causes(found)) == ("due", {"dataset"})
    assert found.reason.startswith("calibration data ")
    assert reruns(found)[:2] == ("calibrate", "quantize")
    assert "serve-baseline" not in reruns(found)


def test_an_edited_recipe(world: World) -> None:
    world.release()
    world.finished()
    world.recipe(gate={"accuracy": {"margin": 0.03}})
    found = world.due()
    assert (found.state, causes(found)) == ("due", {"recipe"})
    assert found.reason == "recipe: gate.accuracy.margin 0.02 -> 0.03"
    assert "quantize" not in reruns(found)
    assert "gate" in reruns(found)


def test_when_it_is_looked_at_is_no_change(world: World) -> None:
    world.release()
    world.recipe(refresh={"schedule": "0 3 * * 6", "priority": 7})
    assert world.due().state == "current"


def test_another_library(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.release()
    world.finished()
    upgraded(monkeypatch, torch="9.9.9")
    found = world.due()
    assert (found.state, causes(found)) == ("due", {"toolchain"})
    assert found.reason.startswith("torch ")
    assert found.reason.endswith("-> 9.9.9")  # told once for all stages
    assert "calibrate" in reruns(found)


def test_another_vllm_serves_the_same_bytes(world: World) -> None:
    world.release()
    world.finished()
    world.vllm = "0.33.0"
    found = world.due()
    assert (found.state, causes(found), found.reason) == ("due", {"serving"}, "vLLM 0.32.0 -> 0.33.0")
    assert reruns(found) == AFTER_SERVING


def test_another_image_serves_the_same_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.release()
    world.finished()
    monkeypatch.setenv("QUANTMINT_IMAGE", f"rocm/vllm@sha256:{'1' * 64}")
    found = world.due()
    assert (found.state, causes(found)) == ("due", {"serving"})
    assert found.reason == "image is new: rocm/vllm@sha256:1111111"
    assert reruns(found) == AFTER_SERVING
    world.release(hour=13)
    assert world.due().state == "current"
    monkeypatch.setenv("QUANTMINT_IMAGE", f"rocm/vllm@sha256:{'2' * 64}")
    assert world.due().reason == "image rocm/vllm@sha256:1111111 -> rocm/vllm@sha256:2222222"


def test_where_nothing_serves_the_version_is_not_known(world: World) -> None:
    world.release()
    world.vllm = None
    found = world.due()
    assert (found.state, found.changes) == ("unknown", ())
    assert found.unknown == ("not installed here, so that its version is not known: vllm",)


@pytest.mark.parametrize("triggers", [["base", "dataset"], ["recipe"]])
def test_triggers_leave_a_cause_out(world: World, triggers: list[str]) -> None:
    world.recipe(refresh={"triggers": triggers})
    world.release()
    world.vllm = "0.33.0"
    found = world.due()
    assert (found.state, causes(found)) == ("current", {"serving"})
    assert found.reason == "left out by refresh.triggers: serving: vLLM 0.32.0 -> 0.33.0"


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "INVALID"])
def test_what_was_judged_is_not_judged_again(world: World, verdict: str) -> None:
    world.release()
    world.vllm = "0.33.0"
    world.finished(verdict=verdict, until="gate")
    found = world.due()
    assert (found.state, found.verdict) == ("held", Verdict(verdict))
    assert found.reason == f"these inputs were judged {verdict} (vLLM 0.32.0 -> 0.33.0)"
    world.vllm = "0.34.0"
    assert (world.due().state, world.due().verdict) == ("due", None)


def test_the_same_inputs_have_the_same_digest(world: World) -> None:
    first = world.due().inputs
    assert world.due().inputs == first != ""
    (world.folder / "words.jsonl").write_text('{"text": "four"}\n')
    assert world.due().inputs != first


BROKEN: dict[str, dict[str, Any]] = {
    "scheme": {"quantization": {**RECIPE["quantization"], "scheme": "ptpc_fp9"}},
    "model": {"source": {"folder": "gone"}},
    "set": {"calibration": {"set": "gone.yaml"}},
    "suite": {"evaluation": {"suite": "gone"}},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_recipe_stops_no_other(world: World, fault: str) -> None:
    world.recipe("bad", **BROKEN[fault])
    bad, good = world.look("bad.yaml", "r.yaml")
    assert (bad.state, bad.stages, good.state) == ("broken", (), "due")
    assert "gone" in bad.reason or "ptpc_fp9" in bad.reason


def test_a_recipe_that_is_not_there(world: World) -> None:
    gone = world.due("gone.yaml")
    assert (gone.state, gone.name, gone.loaded, gone.inputs) == ("broken", "gone.yaml", None, "")


def test_what_was_packaged_and_is_not_everywhere(world: World) -> None:
    world.release()
    world.finished()
    world.recipe(publish={"folder": "published", "keep": 3})
    found = world.due()
    assert (found.state, reruns(found)) == ("due", ("publish",))
    assert found.reason.endswith("is not in all places of the recipe")
