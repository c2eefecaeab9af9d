"""Pairs of payloads, and what the difference is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import ABSENT
from quantmint.pipeline.publish.manifest import HardwareRecord, Manifest, ServingRecord, SourceRecord, StageRecord
from quantmint.pipeline.recipe.faults import YamlPath
from quantmint.pipeline.upkeep.due.causes import DueChange, apart_from_unknown, changes, keys, what_changed

A, B, C, D = "a" * 40, "b" * 40, "c" * 64, "d" * 64
WHEN = "2026-11-20T12:00:00.000Z"
LAUNCH = {"argv": ["vllm", "serve", "MODEL"], "env": {}}
TASK = {"task": "gsm8k", "metric": "exact_match", "files": {}}


def payload(stage: str, version: int = 1, tools: Mapping[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    inputs = {"source": stage[:1] * 64}
    return {"stage": stage, "version": version, "inputs": inputs, "settings": settings, "tools": dict(tools or {})}


BEFORE: Mapping[str, dict[str, Any]] = {
    "source": payload("source", repo="org/base", commit=A),
    "calibrate": payload("calibrate", tools={"torch": "2.13.0"}, set={"repo": "org/set", "revision": A}, seed=0),
    "quantize": payload("quantize", tools={"torch": "2.13.0"}, scheme="fp8"),
    "serve-baseline": payload("serve", tools={"vllm": "0.32.0"}, launch=LAUNCH),
    "canary-baseline": payload("canary", tools={"vllm": "0.32.0"}, prompts=C),
    "evaluate-baseline": payload("evaluate", tools={"lm-eval": "0.4.13", "vllm": "0.32.0"}, tasks=[TASK], limit=None),
    "report": payload("report", tools={"jinja2": "3.1.6"}, recipe="name: r"),
}
RECIPE: Mapping[str, Any] = {"name": "r", "gate": {"margin": 0.01}, "serve": {"overrides": {}}}


def released(stages: Mapping[str, dict[str, Any]] = BEFORE, recipe: Mapping[str, Any] = RECIPE) -> Manifest:
    return Manifest(
        name="r",
        title="r",
        created=WHEN,
        artefact=C,
        verdict="PASS",
        base=SourceRecord("org/base", A, None, {}),
        recipe=recipe,
        recipe_fingerprint=C,
        stages={key: StageRecord(C, 1, WHEN, WHEN, {}, made) for key, made in stages.items()},
        datasets=(),
        tools={},
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
        files={},
        quantmint="0.1.0",
    )


def found(
    now: Mapping[str, dict[str, Any]],
    *,
    recipe: Mapping[str, Any] = RECIPE,
    written: tuple[YamlPath, ...] = (),
    before: Manifest | None = None,
    quantmint: str = "0.1.0",
) -> tuple[DueChange, ...]:
    plan = {**BEFORE, **now}
    return changes(before or released(), plan, recipe, written=written, quantmint=quantmint)


def test_nothing_is_no_change() -> None:
    assert found({}) == ()


def test_an_input_only_follows() -> None:
    moved = {key: {**made, "inputs": {"source": "9" * 64}} for key, made in BEFORE.items()}
    assert found(moved) == ()


@pytest.mark.parametrize(
    ("stage", "change", "cause", "words"),
    [
        ("source", {"settings": {"repo": "org/base", "commit": B}}, "base", "base aaaaaaa -> bbbbbbb"),
        (
            "calibrate",
            {"settings": {"set": {"repo": "org/set", "revision": B}, "seed": 0}},
            "dataset",
            "calibration data aaaaaaa -> bbbbbbb",
        ),
        ("canary-baseline", {"settings": {"prompts": D}}, "dataset", "canary: prompts ccccccc -> ddddddd"),
        (
            "evaluate-baseline",
            {"settings": {"tasks": [{**TASK, "files": {"gsm8k.jsonl": D}}], "limit": None}},
            "dataset",
            "data of gsm8k is new: ddddddd",
        ),
        ("quantize", {"tools": {"torch": "2.14.0"}}, "toolchain", "torch 2.13.0 -> 2.14.0"),
        ("quantize", {"version": 2}, "toolchain", "quantmint's stage quantize 1 -> 2"),
        ("serve-baseline", {"tools": {"vllm": "0.33.0"}}, "serving", "vLLM 0.32.0 -> 0.33.0"),
        (
            "serve-baseline",
            {"settings": {"launch": LAUNCH, "image": f"rocm/vllm@sha256:{D}"}},
            "serving",
            "image is new: rocm/vllm@sha256:ddddddd",
        ),
        (
            "serve-baseline",
            {"settings": {"launch": {**LAUNCH, "env": {"VLLM_X": "1"}}}},
            "serving",
            "serve: launch.env.VLLM_X is new: 1",
        ),
        ("quantize", {"settings": {"scheme": "mxfp4"}}, "recipe", "quantize: scheme fp8 -> mxfp4"),
        (
            "evaluate-baseline",
            {"settings": {"tasks": [TASK], "limit": 10}},
            "recipe",
            "evaluate: limit null -> 10",
        ),
    ],
)
def test_where_a_difference_stands_says_what_it_is(stage: str, change: dict[str, Any], cause: str, words: str) -> None:
    (one,) = found({stage: {**BEFORE[stage], **change}})
    assert (one.cause, one.stage) == (cause, stage)
    assert what_changed([one]) == (words,)


def test_a_line_of_the_recipe_and_what_follows_from_it() -> None:
    edited = {**RECIPE, "gate": {"margin": 0.02}}
    now = {"evaluate-baseline": {**BEFORE["evaluate-baseline"], "settings": {"tasks": [TASK], "limit": 10}}}
    made = found(now, recipe=edited)
    assert {one.cause for one in made} == {"recipe"}
    assert [one.stage for one in made] == ["recipe", "evaluate-baseline"]
    assert what_changed(made) == ("recipe: gate.margin 0.01 -> 0.02",)


def test_a_launch_that_follows_from_the_recipe_or_from_the_model() -> None:
    now = {"serve-baseline": {**BEFORE["serve-baseline"], "settings": {"launch": {**LAUNCH, "env": {"X": "1"}}}}}
    edited = {**RECIPE, "serve": {"overrides": {"X": 1}}}
    assert {one.cause for one in found(now, recipe=edited, written=(("serve", "overrides", "X"),))} == {"recipe"}
    moved = {"source": {**BEFORE["source"], "settings": {"repo": "org/base", "commit": B}}}
    assert {one.cause for one in found({**moved, **now})} == {"base"}


def test_another_set_is_an_edit_and_no_data_that_moved() -> None:
    before = released(recipe={**RECIPE, "calibration": {"set": "one"}})
    now = {"calibrate": {**BEFORE["calibrate"], "settings": {"set": {"repo": "org/other", "revision": B}, "seed": 0}}}
    made = found(now, before=before, recipe={**RECIPE, "calibration": {"set": "two"}})
    assert {one.cause for one in made} == {"recipe"}


def test_a_default_that_quantmint_has_learnt_is_no_edit() -> None:
    newer = {**RECIPE, "gate": {"margin": 0.01, "looks": 4}}
    (one,) = found({}, recipe=newer)
    assert (one.cause, one.path, one.before, one.after) == ("toolchain", "gate.looks", ABSENT, 4)
    (one,) = found({}, recipe=newer, written=(("gate",), ("gate", "looks")))
    assert one.cause == "recipe"


def test_another_quantmint() -> None:
    (one,) = found({}, quantmint="0.2.0")
    assert (one.cause, what_changed([one])) == ("toolchain", ("quantmint 0.1.0 -> 0.2.0",))


def test_what_draws_a_page_changes_no_checkpoint() -> None:
    assert found({"report": payload("report", 3, {"jinja2": "9"}, recipe="name: r, drawn otherwise")}) == ()


def test_stages_that_come_and_go() -> None:
    (new,) = found({"control": payload("control")})
    assert (new.cause, new.stage, new.before) == ("toolchain", "control", ABSENT)
    (gone,) = found({}, before=released({**BEFORE, "bench": payload("bench")}))
    assert (gone.stage, gone.after, what_changed([gone])) == ("bench", ABSENT, ("stage bench is gone",))


def evaluated(commit: str) -> dict[str, Any]:
    task = {**TASK, "data": {"openai/gsm8k": commit}}
    return {**BEFORE["evaluate-baseline"], "settings": {"tasks": [task], "limit": None}}


def test_a_data_set_that_moved_is_named() -> None:
    before = released({**BEFORE, "evaluate-baseline": evaluated(A)})
    (one,) = found({"evaluate-baseline": evaluated(B)}, before=before)
    assert what_changed([one]) == ("data of gsm8k, openai/gsm8k aaaaaaa -> bbbbbbb",)


def test_tools_that_are_not_here() -> None:
    absent = {"tools": {"vllm": "absent"}, "settings": {"launch": {**LAUNCH, "env": {"X": "1"}}}}
    made = found({"serve-baseline": {**BEFORE["serve-baseline"], **absent}})
    assert apart_from_unknown(made) == ({"vllm"}, ())


def test_a_thing_is_told_once() -> None:
    newer = {
        key: {**made, "tools": {**made["tools"], "vllm": "0.33.0"}}
        for key, made in BEFORE.items()
        if made["tools"].get("vllm")
    }
    newer["serve-baseline"]["settings"] = {"launch": {**LAUNCH, "env": {"X": "1"}}}
    assert what_changed(found(newer)) == ("vLLM 0.32.0 -> 0.33.0",)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("$", ()),
        ("gate.accuracy.margin", ("gate", "accuracy", "margin")),
        ('$.tools["lm-eval"]', ("tools", "lm-eval")),
        ('$.settings.tasks.gsm8k.data["openai/gsm8k"]', ("settings", "tasks", "gsm8k", "data", "openai/gsm8k")),
        ('a[0]["x\\"y"]', ("a", 0, 'x"y')),
    ],
)
def test_the_parts_of_a_path(path: str, parts: tuple[str | int, ...]) -> None:
    assert keys(path) == parts
