"""`scheme: auto`: from measured costs to plain overrides, and on to more bits for as long as the gate says FAIL."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.recipe.load import choice_yaml, load_recipe
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs import planner
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.search import known_groups, measured_groups, opened, run_search, settled, stand_in, tried
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.advice import advise
from quantmint.pipeline.stages.sensitivity import SENSITIVITY, read_groups
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.tree import Store

AUTO = "{scheme: auto, from: [mxfp4, ptpc_fp8], bits: BITS, overrides: [{modules: [model.layers.0.mlp.down_proj], "
AUTO += "scheme: ptpc_fp8}], exclude: ['re:.*layers\\.1\\.']}"
COSTS = {"self_attn.{q_proj, k_proj, v_proj}": 4.0, "self_attn.o_proj": 2.0, "mlp.{gate_proj, up_proj}": 1.0}
COSTS |= {"mlp.down_proj": 8.0}
MARGINS = "margin: 0.05, margins: {tiny_arithmetic: 0.06}"  # what four tries can test
BASE = ("source", "sensitivity")


def members(kind: str) -> list[str]:
    parent, _, names = kind.rstrip("}").partition("{")
    return [f"{parent}{name}" for name in names.split(", ")] if names else [kind]


def write_costs(job: Job) -> None:
    groups = [
        {
            "name": f"model.layers.{layer}.{kind}",
            "modules": [f"model.layers.{layer}.{module}" for module in members(kind)],
            "weights": 100,
            "schemes": {"mxfp4": {"cost": cost, "bits": 425}, "ptpc_fp8": {"cost": cost / 100, "bits": 800}},
        }
        for layer in range(2)
        for kind, cost in COSTS.items()
    ]
    (job.path / SENSITIVITY).write_text(json.dumps({"tokens": 1, "groups": groups}))


@pytest.fixture
def make(project: Path, orchestra: Any, with_vllm: Callable[..., Setting], monkeypatch: Any) -> Callable[..., Setting]:
    """``make(bits, passing, search)``: the project's recipe with a budget, whose gate passes from some bits on."""

    plain = (project / "r.yaml").read_text().replace("mi300x", "mi355x").replace("margin: 0.02", MARGINS)

    def made(bits: float | str = 5.0, passing: float = 0.0, search: str = "", published: bool = False) -> Setting:
        path = project / "r.yaml"
        text = plain.replace("{scheme: ptpc_fp8, kv_cache: fp8, format: compressed-tensors}", AUTO)
        path.write_text(text.replace("BITS", str(bits)) + search)

        def stages(setting: Setting) -> list[Any]:
            said = setting.recipe.quantization
            measured = [orchestra.stage("source"), orchestra.stage("sensitivity", "source", work=write_costs)]
            if said.scheme == "auto":
                return measured
            point = None if setting.chosen is None else setting.chosen.point
            verdict = "PASS" if point is not None and point.bits >= passing else "FAIL"
            recipe = [said.model_dump(mode="json"), setting.recipe.gate.accuracy.confidence]
            return [
                *measured,
                orchestra.stage("evaluate-baseline", "source"),
                orchestra.stage("quantize", "source", option=recipe[0]),
                orchestra.stage("gate", "quantize", option=recipe, result={"verdict": verdict, "reasons": []}),
                *([orchestra.stage("report", "gate"), orchestra.stage("publish", "report")] if published else []),
            ]

        monkeypatch.setattr(planner, "stages_of", stages)
        monkeypatch.setattr("quantmint.pipeline.runs.search.require_means", lambda *_: None)
        return with_vllm(open_setting("r.yaml", store=Store(project / "store")))

    return made


def run(setting: Setting, **options: Any) -> Any:
    return run_search(setting, PlainReporter(SimpleNamespace(write=lambda _: None, flush=lambda: None)), **options)


def test_the_choice_is_a_recipe_with_plain_overrides_beside_those_that_were_written(make: Any, orchestra: Any) -> None:
    found = run(make(bits=6.2))
    assert orchestra.ran == [*BASE, "evaluate-baseline", "quantize", "gate"]
    assert found[1].recipe.quantization.model_dump(mode="json", include={"scheme", "overrides"}) == {
        # Of four groups one is overridden to 8 bits, so that one of the others may have 8: the one that costs most.
        "scheme": "mxfp4",
        "overrides": [
            {"modules": ["model.layers.0.mlp.down_proj"], "scheme": "ptpc_fp8"},
            {"modules": [r"re:model\.layers\.0\.self_attn\.(q_proj|k_proj|v_proj)$"], "scheme": "ptpc_fp8"},
        ],
    }
    assert found[1].chosen.point.bits <= 6.2
    assert "auto" not in choice_yaml(found[1].recipe.quantization)
    again = load_recipe("r.yaml").recipe.model_dump(mode="json")
    kept = ("name", "source", "calibration", "target", "evaluation", "publish")
    assert all(found[1].recipe.model_dump(mode="json")[name] == again[name] for name in kept)


def test_all_budgets_share_what_was_measured_and_a_later_run_follows_at_once(make: Any, orchestra: Any) -> None:
    run(make(bits=5.5))
    setting = make(bits=7.5)
    assert setting.chosen is not None  # the store knows, so that plan, explain and publish see the choice
    run(setting)
    assert orchestra.ran.count("sensitivity") == orchestra.ran.count("evaluate-baseline") == 1
    assert orchestra.ran.count("quantize") == 2


def test_before_anything_is_measured_the_largest_scheme_stands_in(make: Any) -> None:
    setting = make()
    assert setting.chosen is None
    assert [planned.key for planned in build_plan(setting)] == [*BASE]
    assert stand_in(setting).recipe.quantization.scheme == "ptpc_fp8"
    assert "gate" in [planned.key for planned in build_plan(stand_in(setting))]


def test_a_budget_below_what_its_overrides_leave_is_refused_with_what_is_needed(make: Any) -> None:
    with pytest.raises(UserError, match=r"found 4.3, expected at least 5.188"):
        run(make(bits=4.3))


def test_a_fail_sends_the_run_to_more_bits_until_one_passes(make: Any, orchestra: Any) -> None:
    found = run(make(bits=5.2, passing=7.0, search="search: {until: pass, tries: 4}\n"))
    assert found[0].verdict is Verdict.PASS
    bits = [one["bits"] for one in found[2]]
    verdicts = [one["verdict"] for one in found[2]]
    assert verdicts == ["PASS" if each >= 7.0 else "FAIL" for each in bits]
    assert (verdicts[0], "PASS" in verdicts) == ("FAIL", True)
    assert found[1].chosen.point.bits == min(each for each in bits if each >= 7.0), "of those that passed the fewest"
    assert 2 <= len(set(bits)) == len(bits) <= 4
    assert orchestra.ran.count("evaluate-baseline") == orchestra.ran.count("sensitivity") == 1
    assert found[1].recipe.gate.accuracy.confidence == pytest.approx(1 - 0.05 / 4)
    # A second run goes where the first ended; so does whatever asks for the recipe's state.
    ran = list(orchestra.ran)
    setting = make(bits=5.2, passing=7.0, search="search: {until: pass, tries: 4}\n")
    assert run(setting)[1].recipe == found[1].recipe
    assert orchestra.ran == ran


def test_between_two_tries_a_search_goes_down_and_publishes_the_fewest_that_passed(make: Any, orchestra: Any) -> None:
    """Only that one: a PASS on the way is reported, and stays unpublished. An interruption goes on where it was."""
    search = "search: {tries: 10}\n"
    found = run(make(bits=5.2, passing=6.0, search=search, published=True))
    bits = [(one["bits"], one["verdict"]) for one in found[2]]
    assert [verdict for _, verdict in bits] == ["FAIL", "PASS", "PASS"], bits
    assert bits[2][0] < bits[1][0], "down again"
    assert found[1].chosen.point.bits == pytest.approx(bits[2][0], abs=1e-3)
    assert orchestra.ran.count("report") == 3
    assert orchestra.ran.count("publish") == 1
    assert [verdict for _, verdict in tried(found[1])] == [Verdict.FAIL, Verdict.PASS, Verdict.PASS]
    assert settled(make(bits=5.2, passing=6.0, search=search, published=True)).recipe == found[1].recipe


def test_where_none_passes_the_last_verdict_stays(make: Any) -> None:
    setting = make(bits=5.2, passing=99, search="search: {tries: 4}\n")  # four groups have three points worth a try
    found = run(setting)
    assert (found[0].verdict, len(found[2])) == (Verdict.FAIL, 2)
    assert found[2][-1]["groups"] == {"ptpc_fp8": 4}
    assert [verdict for _, verdict in tried(setting)] == [Verdict.FAIL] * 2
    assert settled(setting).recipe == found[1].recipe


def test_a_run_may_end_with_what_was_measured(make: Any, orchestra: Any) -> None:
    run(make(bits=6), until="sensitivity")
    assert orchestra.ran == [*BASE]
    with pytest.raises(UserError, match="--until: found 'nothing'"):
        run(make(bits=6), until="nothing")


def test_what_is_measured_knows_gptq_and_neither_budget_nor_layout(project: Path, with_vllm: Any) -> None:
    path = project / "r.yaml"
    plain = path.read_text().replace("mi300x", "mi355x")
    words = project / "words.jsonl"
    words.write_text(4 * words.read_text())  # one for each sample

    def measured(section: str, more: str = "") -> str:
        old = "{scheme: ptpc_fp8, kv_cache: fp8, format: compressed-tensors}"
        path.write_text(plain.replace(old, f"{{scheme: auto, {section}}}").replace("samples: 4", f"samples: 4{more}"))
        setting = with_vllm(open_setting("r.yaml", store=Store(project / "store")))
        return next(one.fingerprint for one in build_plan(setting) if one.key == "sensitivity")

    first = measured("from: [mxfp4, ptpc_fp8], bits: 5")
    assert measured("from: [ptpc_fp8, mxfp4], bits: 6, format: quark, exclude: ['re:.*o_proj']") == first
    by_gptq = measured("from: [mxfp4, ptpc_fp8], bits: 5, algorithm: gptq")
    assert by_gptq != first
    assert by_gptq == measured("from: [mxfp4, ptpc_fp8], bits: 6, algorithm: gptq, gptq: {compensation: 0}")
    assert by_gptq != measured("from: [mxfp4, ptpc_fp8], bits: 5, algorithm: gptq, gptq: {dampening: 0.1}")
    assert measured("from: [mxfp4, fp8], bits: 5") != first
    assert measured("from: [mxfp4, ptpc_fp8], bits: 5", ", packing: false") != first


def test_after_a_fail_the_costliest_groups_and_the_next_step_up_are_told(make: Any) -> None:
    found = run(make(bits=6.2, passing=99))
    assert advise(found[1], read_groups(found[0].entry("sensitivity"))).lines == (
        "of the cost that was predicted, 3.12 nats, most is that of model.layers.0.self_attn.o_proj in mxfp4 (64%), "
        "model.layers.0.mlp.{gate_proj, up_proj} in mxfp4 (32%), model.layers.0.mlp.down_proj in ptpc_fp8 (3%)",
        "0.94 bits a weight more are predicted to save 63% of it: `bits: 7.07`",
    )
    found = run(make(bits="null, objective: throughput, speedup: 2.5", passing=99))
    assert found[1].chosen.to_json()["estimated_speedup"] >= 2.5
    assert "estimated 2." in found[1].chosen.line
    _, said = advise(found[1], read_groups(found[0].entry("sensitivity"))).lines
    assert "are predicted to save" in said
    assert "`speedup: 2." in said


FOUR = "{scheme: mxfp4, format: quark, overrides: [{modules: [model.layers.0.mlp.down_proj], scheme: ptpc_fp8}]}"


@pytest.fixture
def four(make: Any, project: Path) -> Callable[[str], Setting]:
    """The project's recipe in one scheme of four bits, served by the reference, with another quantization if given."""

    def made(said: str = FOUR) -> Setting:
        text = make(bits=6.2).loaded.path.read_text().split("quantization:")
        rest = text[1].partition("\n")[2]
        (project / "r.yaml").write_text(f"{text[0]}quantization: {said}\n{rest}")
        return open_setting("r.yaml", store=Store(project / "store"))

    return made


def test_after_a_fail_in_four_bits_what_helps_is_a_block_that_a_recipe_takes(four: Any, orchestra: Any) -> None:
    setting = four()
    assert known_groups(setting) is None
    first = advise(setting)
    gptq, command, auto = first.lines
    assert "`quantmint search r` measures the KL with one group of layers at a time in ptpc_fp8" in command
    assert "paste this into the recipe" in auto
    said = yaml.safe_load(gptq.split("`")[1])["quantization"]
    assert four(yaml.safe_dump({**yaml.safe_load(FOUR), **said}, default_flow_style=True, width=999).strip())
    sections = yaml.safe_load(first.paste)
    assert sections["quantization"]["algorithm"] == "gptq", "at each bit it loses less"
    assert pasted_into("r.yaml", first.paste).search.tries == sections["search"]["tries"] == 6
    stopped = advise(four(), stopped="canary-candidate").lines
    assert stopped[-1].endswith("`gate: {canary: null}`")
    assert advise(setting, verdict=Verdict.INCONCLUSIVE).lines == ()
    assert advise(setting, verdict=Verdict.INCONCLUSIVE, stopped="canary-candidate").lines == stopped[:-1]

    measured_groups(replace(setting, loaded=opened(setting.loaded)), PlainReporter())
    groups = known_groups(setting)
    assert groups is not None
    advice = advise(setting, groups)
    assert advice.lines == (
        "predicted KL 22.1 nats, which says where more than how much; with one group of layers in ptpc_fp8:",
        "  14.2 with model.layers.1.mlp.down_proj, 0.47 bits a weight more",
        "  18.1 with model.layers.0.self_attn.{q_proj, k_proj, v_proj}, 0.47 bits a weight more",
        "  18.1 with model.layers.1.self_attn.{q_proj, k_proj, v_proj}, 0.47 bits a weight more",
        "  20.1 with model.layers.0.self_attn.o_proj, 0.47 bits a weight more",
        "  20.1 with model.layers.1.self_attn.o_proj, 0.47 bits a weight more",
        "10.2 with 2 of 7 so, 5.66 bits a weight for 4.72: scheme and overrides for the recipe",
    )
    said = yaml.safe_load(advice.paste)["quantization"]
    assert said == {
        "scheme": "mxfp4",
        "overrides": [
            {
                "modules": [
                    r"re:model\.layers\.(0|1)\.mlp\.down_proj$",
                    r"re:model\.layers\.0\.self_attn\.(q_proj|k_proj|v_proj)$",
                ],
                "scheme": "ptpc_fp8",
            }
        ],
    }
    pasted = four(yaml.safe_dump({"format": "quark", **said}, default_flow_style=True, width=999).strip())
    assert advise(pasted, groups).lines[0].startswith("predicted KL 10.2 nats")


def pasted_into(name: str, block: str) -> Recipe:
    """Write a block over the sections of its names in a recipe, as a person pastes it; the recipe that it becomes."""
    path = Path(name)
    data = yaml.safe_load(path.read_text()) | yaml.safe_load(block)
    path.with_name("pasted.yaml").write_text(yaml.safe_dump(data | {"name": "pasted"}, sort_keys=False))
    return load_recipe("pasted.yaml").recipe


def test_in_eight_bits_scales_by_channel_help_then_sixteen_bits(four: Any) -> None:
    """What orders layers is their measured cost, never the errors of their weights."""
    first = advise(four("{scheme: fp8, kv_cache: fp8}"))
    assert yaml.safe_load(first.paste)["quantization"] == {"scheme": "ptpc_fp8", "kv_cache": "auto"}
    assert pasted_into("r.yaml", first.paste).quantization.kv_cache == "auto"
    second = advise(four("{scheme: ptpc_fp8}"))
    assert yaml.safe_load(second.paste)["quantization"]["exclude"] == [r"re:.*\.down_proj$"]
    assert list(pasted_into("r.yaml", second.paste).quantization.exclude) == [r"re:.*\.down_proj$"]


@pytest.mark.parametrize("search", ["", "search: {tries: 4}\n"])
def test_where_costs_are_known_eight_bits_give_way_to_sixteen_where_they_cost_most(make: Any, search: str) -> None:
    found = run(make(bits=8.0, passing=99, search=search))
    advice = advise(found[1], read_groups(found[0].entry("sensitivity")))
    assert "make half of the predicted cost" in advice.lines[-1]
    excluded = pasted_into("r.yaml", advice.paste).quantization.exclude
    assert excluded[0] == r"re:.*layers\.1\.", "what was excluded stays so"
    assert any("down_proj" in pattern for pattern in excluded[1:]), "of 8 in 15 parts"


def test_texts_that_init_wrote_are_named_with_as_many_samples_as_they_have(four: Any, project: Path) -> None:
    setting = four("{scheme: mxfp4, format: quark}")
    text = (project / "r.yaml").read_text()
    head, _, tail = text.partition("calibration:")
    (project / "r.yaml").write_text(head + tail.partition("\n")[2])
    own = project / "r-eval"
    own.mkdir()
    (own / "r-texts.jsonl").write_text("\n".join(json.dumps({"text": "word " * 600}) for _ in range(8)))
    (own / "r-texts.yaml").write_text("name: r-texts\ndescription: Some.\nfile: r-texts.jsonl\ntext: text\n")
    setting = open_setting("r.yaml", store=setting.store)
    assert setting.recipe.calibration is None
    said = yaml.safe_load(advise(setting).paste)["calibration"]
    assert said == {"set": "r-eval/r-texts.yaml", "samples": 9, "sequence_length": 512}
    (own / "r-texts.yaml").unlink()
    hub = {"set": "ultrachat", "sequence_length": 512}
    assert yaml.safe_load(advise(setting).paste)["calibration"] == hub, "no longer than the model's positions"


def test_what_undoes_an_extended_recipe_is_in_the_block(four: Any, project: Path) -> None:
    """`kv_cache: auto` is the default, but not of this base: without it the block would mean an FP8 cache."""
    setting = four(
        "{scheme: mxfp4, format: quark, kv_cache: fp8, overrides: [{modules: ['re:.*o_proj'], scheme: fp8}]}"
    )
    (project / "r.yaml").rename(project / "base.yaml")
    (project / "r.yaml").write_text(
        "extends: base.yaml\nname: r\ndescription: A test.\n"
        "quantization: {scheme: mxfp4, format: quark, kv_cache: auto, overrides: []}\n"
    )
    block = advise(open_setting("r.yaml", store=setting.store)).paste
    assert yaml.safe_load(block)["quantization"].items() >= {"kv_cache": "auto", "overrides": []}.items()
    (project / "r.yaml").write_text(f"extends: base.yaml\nname: r\ndescription: A test.\n{block}")
    pasted = load_recipe(project / "r.yaml").recipe.quantization
    assert (pasted.kv_cache, pasted.overrides) == ("auto", ())


def test_texts_that_are_too_few_for_gptq_are_chosen_by_without_it(four: Any, project: Path) -> None:
    """A Hessian of 64 channels takes as many tokens: 1 x 48 are too few, for the sensitivities they do."""
    setting = four("{scheme: mxfp4, format: quark}")
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(text.replace("samples: 4, sequence_length: 64", "samples: 1, sequence_length: 48"))
    sections = yaml.safe_load(advise(open_setting("r.yaml", store=setting.store)).paste)
    assert sections["quantization"]["scheme"] == "auto"
    assert "algorithm" not in sections["quantization"]
    assert yaml.safe_load(advise(setting).paste)["quantization"]["algorithm"] == "gptq"
