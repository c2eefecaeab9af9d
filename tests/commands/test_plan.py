"""`quantmint plan`: what is shipped, without a network, weights or vLLM."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import workloads
from quantmint.pipeline.recipe.load import load_recipe, recipe_names
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.baseline_launches import baseline_launches
from quantmint.pipeline.stages.bench import BenchStage, source_of
from quantmint.pipeline.stages.calibrate import needs_ranges
from quantmint.pipeline.store.gc import list_runs
from quantmint.pipeline.store.tree import Store
from tests.eval.measured import make_launches

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = [name for name in recipe_names() if load_recipe(name).recipe.source.repo is not None]
LARGEST = ("deepseek-r1-mxfp4", "deepseekv4flash-mxfp4", "kimik2thinking-mxfp4", "kimik25-mxfp4")
AMDS = [name for name in SHIPPED if not name.startswith(("llama8b", "llama70b", "llama405b", "mixtral"))]
"""Recipes of models that AMD publishes quantized for nodes of eight."""
Quantmint = Callable[..., Any]

COST = {"seconds", "written", "memory", "device_memory", "disk", "bound", "parts", "mode"}


def require_shape(plan: dict[str, Any]) -> None:
    """What programs read, by its keys."""
    keys = {
        "recipe",
        "source",
        "stages",
        "machine",
        "seconds",
        "not_predicted",
        "savings",
        "predicted",
        "costs",
        "disk",
        "gate",
        "bench",
        "cautions",
    }
    assert plan.keys() - {"auto", "further_tries", "seconds_of_all_tries"} == keys
    assert plan["not_predicted"] == [stage["stage"] for stage in plan["stages"] if stage["by"] is None] == []
    assert all(stage.keys() == {"stage", "fingerprint", "cached", "seconds", "by"} for stage in plan["stages"])
    known = [stage["seconds"] for stage in plan["stages"] if stage["by"] is not None]
    assert plan["seconds"] == pytest.approx(sum(known) + plan["costs"]["rates"]["start"])
    assert all(0 < saving["seconds"] < plan["seconds"] for saving in plan["savings"])
    assert plan["predicted"].keys() > {"parameters", "source", "checkpoint", "weights_per_gpu", "kv_bytes_per_token"}
    assert plan["costs"].keys() == {"rates", "stages"}
    assert plan["costs"]["rates"].keys() > {"origin", "machine", "kernels"}
    assert all(cost.keys() == COST and cost["seconds"] > 0 for cost in plan["costs"]["stages"].values())
    assert plan["disk"].keys() == {"needed", "free", "where"}
    assert plan["gate"].keys() == {"passes", "false_fails", "tasks", "speed"}
    for task in plan["gate"]["tasks"].values():
        assert task.keys() == {"items", "margin", "detectable", "looks", "expected", "passes"}
    speed = {"min_ratio", "launches", "fewest", "detectable_spreads", "noise", "least", "seen", "needed"}
    assert plan["gate"]["speed"].keys() == speed
    figures = {"launches", "prompts", "prompt_tokens", "output_tokens", "seconds", "noise", "ratio"}
    assert plan["bench"].keys() == figures


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("quantmint.pipeline.runs.forecast", "quantmint.pipeline.runs.preflight"):
        monkeypatch.setattr(f"{place}.free_bytes", lambda path: 10**16)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGEST else []) for name in SHIPPED]
)
@pytest.mark.usefixtures("_no_network", "large_disk")
def test_every_shipped_recipe_plans(quantmint: Quantmint, name: str) -> None:
    recipe = load_recipe(name).recipe
    config = CONFIGS / str(recipe.source.repo).rpartition("/")[2]
    ended = quantmint("plan", name, "--config", config, "--json")
    assert ended.code == 0, ended.err
    plan = ended.json
    require_shape(plan)
    assert plan["recipe"] == name

    sizes = plan["predicted"]
    released = json.loads((config / "config.json").read_text())
    method = released.get("expert_dtype") or released.get("quantization_config", {}).get("quant_method")
    # Bytes a weight: MXFP4 with what gpt-oss has in 16 bit, or V4 in FP8, INT4 in groups of 32 with what Kimi has.
    width = {None: 2, "fp8": 1, "fp4": 0.57, "mxfp4": 0.56, "compressed-tensors": 0.58}[method]
    assert sizes["source"] == pytest.approx(width * sizes["parameters"], rel=0.02 if method is None else 0.03)
    ratio = sizes["source"] * 2 / width / sizes["checkpoint"]
    low, high = {
        "mxfp4": (3.3, 4.0),  # 4.25 bits a weight, what is kept in 16 bit takes from it
        "mxfp4_fp8": (3.4, 4.0),
        "fp8": (1.75, 2.0),
        "ptpc_fp8": (1.75, 2.0),
        "auto": (1.75, 2.0),  # nothing is measured yet: all in the largest scheme
    }[recipe.quantization.scheme]
    assert low < ratio < high
    gpus = recipe.target.gpus
    assert gpus * sizes["weights_per_gpu"] == pytest.approx(sizes["checkpoint"], abs=gpus)
    assert plan["disk"]["needed"]["download"] == sizes["source"]
    assert plan["disk"]["needed"]["checkpoint"] == sizes["checkpoint"]
    copied = sizes["checkpoint"] if recipe.publish.folder is not None else None
    assert plan["disk"]["needed"].get("published copy") == copied
    costs = plan["costs"]["stages"]
    assert sizes["checkpoint"] == costs["quantize"]["disk"]
    assert plan["machine"] == f"{recipe.target.hardware}:{gpus}"
    assert plan["costs"]["rates"]["origin"] == "data sheet"
    assert costs.get("calibrate", {"seconds": 0})["seconds"] < 600, "of eight Instincts, not of this machine"
    calibrated = recipe.calibration is not None and needs_ranges(recipe.quantization)
    assert ("calibrate" in costs) == calibrated
    assert ("sensitivity" in costs) == (recipe.quantization.scheme == "auto")
    assert ("further_tries" in plan) == (recipe.search is not None)
    assert ("forwards" in costs["quantize"]["parts"]) == (recipe.quantization.algorithm == "gptq")
    assert not any(stage["cached"] for stage in plan["stages"])
    assert ("calibrate" in [stage["stage"] for stage in plan["stages"]]) == calibrated
    gated = [facts for facts in plan["gate"]["tasks"].values() if facts["margin"] is not None]
    assert gated
    assert all(facts["margin"] >= facts["detectable"] for facts in gated)
    assert all(facts["looks"][-1] == facts["items"] for facts in gated)
    speed = plan["gate"]["speed"]
    assert speed["launches"] >= speed["fewest"]
    assert 1 < speed["least"] / speed["min_ratio"] < 1.03, "of a promise, what launches can show of it"
    load = workloads.load(recipe.target.workload).cells
    assert plan["bench"]["launches"] == 2 * speed["launches"] + 1
    if sizes["active"] < 72e9:  # a larger model needs longer to read as many prompts
        assert plan["bench"]["seconds"] <= 45 * 60, "a proof that a schedule repeats"
    assert plan["bench"]["prompts"] >= sum(12 * (cell.concurrency or 0) for cell in load)
    assert not Path("store").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", AMDS)
@pytest.mark.usefixtures("_no_network", "large_disk")
def test_recipes_of_amds_models_plan_on_nodes_of_mi300x_and_mi355x(quantmint: Quantmint, name: str) -> None:
    """Time, memory and disk on the machine that the recipe is not made for; the test above has the other one."""
    recipe = load_recipe(name).recipe
    config = CONFIGS / str(recipe.source.repo).rpartition("/")[2]
    machines = {"mi300x:8": 192, "mi355x:8": 288}
    machines.pop(f"{recipe.target.hardware}:{recipe.target.gpus}", None)
    for machine, gigabytes in machines.items():
        ended = quantmint("plan", name, "--config", config, "--for", machine, "--json")
        assert ended.code == 0, ended.err
        plan = ended.json
        assert plan["machine"] == machine
        quantize, sizes = plan["costs"]["stages"]["quantize"], plan["predicted"]
        assert 5 < quantize["seconds"] < plan["seconds"] < 48 * 3600
        assert 0 < quantize["device_memory"] < gigabytes * 1e9
        assert 0 < sizes["weights_per_gpu"] < 0.9 * gigabytes * 1e9
        assert plan["disk"]["needed"]["checkpoint"] == sizes["checkpoint"] == quantize["disk"]


@pytest.mark.usefixtures("_no_network", "large_disk")
def test_what_a_kv_cache_costs(quantmint: Quantmint) -> None:
    config = CONFIGS / "Llama-3.1-8B-Instruct"
    sixteen, eight = (
        quantmint("plan", name, "--config", config, "--json").json["predicted"]["kv_bytes_per_token"]
        for name in ("llama8b-ptpc", "llama8b-fp8kv")
    )
    assert (sixteen, eight) == (2 * 32 * 8 * 128 * 2, 2 * 32 * 8 * 128)


@pytest.mark.usefixtures("_no_network", "large_disk")
def test_all_endpoints_of_an_8b_model_take_at_most_half_as_long_again(quantmint: Quantmint, project: Path) -> None:
    def evaluation(recipe: str) -> float:
        (project / "8b.yaml").write_text(f"extends: {RECIPES / 'llama8b-fp8kv.yaml'}\nname: 8b\n{recipe}")
        plan = quantmint("plan", "8b.yaml", "--config", CONFIGS / "Llama-3.1-8B-Instruct", "--json").json
        apart = ("source", "calibrate", "quantize", "inspect", "serve", "bench", "gate", "report", "package", "publish")
        return sum(stage["seconds"] for stage in plan["stages"] if not stage["stage"].startswith(apart))

    suite = evaluation("")
    served = "serve: {arguments: [--enable-auto-tool-choice, --tool-call-parser, llama3_json]}\n"
    further = served + "evaluation: {tools: auto, long: %s, reasoning: auto}\ngate: {kl: {max: 0.05}}\n"
    assert 1.1 * suite < evaluation(further % "auto") <= 1.25 * suite
    longer = "target: {max_model_len: 131072}\n" + further
    assert evaluation(longer % "{lengths: [8192, 32768, 65536], texts: 32}") <= 1.5 * suite


@pytest.mark.usefixtures("_no_network", "large_disk")
def test_what_a_person_reads(quantmint: Quantmint, project: Path) -> None:
    ended = quantmint("plan", "r.yaml")
    assert ended.code == 0
    assert ended.err == ""
    for words in (
        "quantize",
        "to do",
        "source",
        "weights on each device",
        "tiny_facts",
        "disk: free",
        "times on",
    ):
        assert words in ended.out
    assert "\x1b" not in ended.out


@pytest.mark.usefixtures("large_disk")
def test_what_is_not_done_costs_nothing(quantmint: Quantmint, project: Path) -> None:
    """A recipe may say how to calibrate and use a scheme that has nothing to be calibrated."""
    for scheme, calibrated in (("fp8", True), ("ptpc_fp8", False)):
        (project / "other.yaml").write_text(
            f"extends: r.yaml\nname: other\nquantization: {{scheme: {scheme}, kv_cache: auto}}\n"
            "calibration: {set: sentences.yaml, samples: 1, sequence_length: 8}\n"
        )
        plan = quantmint("plan", "other.yaml", "--json").json
        stages = [stage["stage"] for stage in plan["stages"]]
        assert ("calibrate" in stages, "calibrate" in plan["costs"]["stages"]) == (calibrated, calibrated)


@pytest.mark.usefixtures("large_disk")
def test_an_algorithm_that_harms_a_scheme_is_a_caution(quantmint: Quantmint, project: Path) -> None:
    def cautions(scheme: str, more: str) -> str:
        (project / "other.yaml").write_text(
            "extends: r.yaml\nname: other\ncalibration: null\n"
            f"quantization: {{scheme: {scheme}, kv_cache: auto, engine: quark, format: quark{more}}}\n"
        )
        ended = quantmint("plan", "other.yaml", "--json")
        assert ended.code == 0, ended.err
        return " ".join(ended.json["cautions"])

    assert "rotation may harm mxfp4: SmolLM2-135M loses less by rounding" in cautions("mxfp4", ", algorithm: rotation")
    assert "may harm" not in cautions("mxfp4", "")
    assert "may harm" not in cautions("int8_w8a8", ", algorithm: rotation")
    mixed = ", algorithm: rotation, overrides: [{modules: ['re:.*down_proj'], scheme: mxfp4_weight_only}]"
    assert "rotation may harm mxfp4_weight_only" in cautions("int8_w8a8", mixed)


@pytest.mark.parametrize("command", ["plan", "run", "quantize"])
def test_texts_that_make_too_few_tokens_are_refused(
    quantmint: Quantmint, models: Callable[..., Path], command: str
) -> None:
    Path("words.txt").write_text("w5 w6 w7 w8\n" * 20)
    Path("words.yaml").write_text("name: words\ndescription: Words.\nfile: words.txt\n")
    Path("r.yaml").write_text(
        f"name: r\nsource: {{folder: {models('llama')}}}\nquantization: {{scheme: ptpc_fp8, kv_cache: fp8}}\n"
        "calibration: {set: words.yaml, samples: 4, sequence_length: 64}\n"
        "target: {max_model_len: 512, workload: tiny}\nevaluation: {suite: tiny}\ngate: {accuracy: {margin: 0.02}}\n"
    )
    if command == "quantize":
        scheme = ("--scheme", "ptpc_fp8", "--kv-cache", "fp8")
        texts = ("--calibration", "words.yaml", "--samples", "4", "--sequence-length", "64")
        ended = quantmint("quantize", models("llama"), "out", *scheme, *texts)
    else:
        ended = quantmint(command, "r.yaml", "--store", "store")
        assert "r.yaml:4:41: " in ended.err
    assert ended.code == 2
    assert "samples: the calibration texts make 100 tokens" in ended.err
    assert not Path("out").exists()
    assert not list(Path("store").glob("*/*"))


@pytest.mark.usefixtures("large_disk")
def test_brackets_are_text(quantmint: Quantmint, project: Path) -> None:
    recipe = project / "r.yaml"
    recipe.write_text(recipe.read_text().replace("A test.", "'Made [/by] hand [bold].'"))
    ended = quantmint("plan", "r.yaml")
    assert ended.code == 0
    assert "Made [/by] hand [bold]." in ended.out


@pytest.mark.usefixtures("large_disk")
def test_the_plan_says_what_is_cached(orchestra: Any, quantmint: Quantmint) -> None:
    stages = [orchestra.stage("a"), orchestra.stage("b", "a")]
    orchestra.run(stages[0])
    orchestra.plan(*stages)
    told = quantmint("plan", "r.yaml", "--json").json
    assert [(stage["stage"], stage["cached"]) for stage in told["stages"]] == [("a", True), ("b", False)]
    assert orchestra.ran == ["a"], "nothing is made"


@pytest.mark.usefixtures("large_disk")
def test_what_took_an_hour_is_expected_to_take_it_again(orchestra: Any, quantmint: Quantmint) -> None:
    orchestra.run(orchestra.stage("source"), orchestra.stage("canary-baseline", "source"))
    run = list_runs(orchestra.setting.store.root)[0].path
    told = json.loads(run.read_text())
    told["facts"]["stages"]["canary-baseline"]["seconds"] = 3600.0
    run.write_text(json.dumps(told))
    stages = [orchestra.stage(key, "source", option=2) for key in ("canary-baseline", "canary-candidate")]
    orchestra.plan(orchestra.stage("source"), *stages)
    found = quantmint("plan", "r.yaml", "--for", "here", "--json").json["stages"][1:]
    assert [(stage["seconds"], stage["by"]) for stage in found] == [(3600.0, "seen"), (3600.0, "seen")]
    assert "about 2 h 00 min in all" in quantmint("plan", "r.yaml", "--for", "here").out
    elsewhere = quantmint("plan", "r.yaml", "--for", "mi300x:8", "--json").json["stages"][1:]
    assert {stage["by"] for stage in elsewhere} == {"reckoned"}, "this store's times are of another machine"


@pytest.mark.usefixtures("large_disk")
def test_a_machine_is_planned_for_by_its_name(quantmint: Quantmint, project: Path) -> None:
    plans = {
        name: quantmint("plan", "r.yaml", "--for", name, "--json").json for name in ("here", "mi300x:1", "mi300x:8")
    }
    assert [plan["machine"] for plan in plans.values()] == list(plans)
    assert plans["mi300x:8"]["costs"]["rates"]["machine"].startswith("AMD Instinct MI300X by its data sheet")
    assert plans["here"]["costs"]["rates"]["machine"] != plans["mi300x:8"]["costs"]["rates"]["machine"]
    told = quantmint("plan", "r.yaml", "--for", "mi300x:8")
    assert "in all on mi300x:8, from here to the end" in told.out
    assert "nobody has measured it" in told.out
    wrong = quantmint("plan", "r.yaml", "--for", "mi300z:8")
    assert (wrong.code, 'did you mean "mi300x"' in wrong.err) == (2, True)


def test_a_disk_that_is_too_small_here_is_a_caution_for_a_run_elsewhere(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.forecast.free_bytes", lambda path: 10_000_000)
    ended = quantmint("plan", "r.yaml", "--for", "mi300x:8")
    assert ended.code == 0
    assert "are needed where it runs; on this machine" in " ".join(ended.out.split())


@pytest.mark.usefixtures("large_disk")
def test_a_total_without_a_stage_is_at_least(quantmint: Quantmint, project: Path) -> None:
    """A library's time is nobody's to predict; sensitivities, GPTQ and further tries are ours."""
    (project / "library.yaml").write_text(
        "extends: r.yaml\nname: library\nquantization: {scheme: ptpc_fp8, kv_cache: auto, engine: llmcompressor, "
        "format: compressed-tensors}\ncalibration: null\n"
    )
    plan = quantmint("plan", "library.yaml", "--json").json
    assert plan["not_predicted"] == ["quantize"]
    told = quantmint("plan", "library.yaml").out
    assert "at least " in told
    assert "; quantize not counted" in told
    (project / "search.yaml").write_text(
        "extends: r.yaml\nname: search\nquantization: {scheme: auto, from: [mxfp4, ptpc_fp8], bits: 5, kv_cache: auto, "
        "format: quark, algorithm: gptq}\ncalibration: {set: sentences.yaml, samples: 8, sequence_length: 32}\n"
        "search: {tries: 3}\ngate: {accuracy: {margins: {tiny_arithmetic: 0.06}}}\n"
    )
    ended = quantmint("plan", "search.yaml", "--json")
    assert ended.code == 0, ended.err
    plan = ended.json
    assert plan["not_predicted"] == []
    stages = {stage["stage"]: stage["seconds"] for stage in plan["stages"]}
    assert stages["sensitivity"] > 0
    assert plan["further_tries"] == 2
    again = (
        "quantize",
        "inspect",
        "serve-candidate",
        "canary-candidate",
        "evaluate-candidate",
        "bench",
        "gate",
        "report",
    )
    one = sum(stages.get(key, 0.0) for key in again)
    assert plan["seconds_of_all_tries"] == pytest.approx(plan["seconds"] + 2 * one)
    assert "with 2 more tries of the search" in quantmint("plan", "search.yaml").out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_disk_that_is_too_small(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.forecast.free_bytes", lambda path: 10_000_000)
    ended = quantmint("plan", "r.yaml", "--for", "here", *(["--json"] if as_json else []))
    assert ended.code == 2
    assert "10.0 MB are free" in ended.err
    assert ended.err.count("quantmint:") == 1
    if as_json:
        assert ended.json["exit_code"] == 2
    else:
        assert "checkpoint (" in ended.out, "the numbers are shown all the same"


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.usefixtures("large_disk")
def test_a_disk_that_is_too_small_to_publish_to(
    orchestra: Any, quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    orchestra.plan(*(orchestra.stage(key) for key in ("source", "quantize", "publish")))
    published = project / "published"
    monkeypatch.setattr(
        "quantmint.pipeline.runs.preflight.free_bytes", lambda path: 10 if path.is_relative_to(published) else 10**12
    )
    here = ["--for", "here"] if command == "plan" else []
    ended = quantmint(command, "r.yaml", *here)
    assert (ended.code, orchestra.ran) == (2, [])
    assert f"publish.folder: {published / 'r'}: " in ended.err
    assert quantmint(command, "r.yaml", *here, "--json").json["exit_code"] == 2, "one object, which says why"


def test_a_run_refuses_such_a_disk_before_it_begins(
    orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra.plan(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: 10_000_000)
    ended = quantmint("run", "r.yaml")
    assert (ended.code, orchestra.ran) == (2, [])
    assert "logs and samples 67.1 MB), 10.0 MB are free" in ended.err


def test_what_an_interrupted_run_has_written_needs_no_room_again(
    orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra.plan(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    needed = quantmint("plan", "r.yaml", "--json").json["disk"]["needed"]
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: needed["logs and samples"] + 4096)
    assert quantmint("run", "r.yaml").code == 2
    quantize = next(
        stage for stage in quantmint("plan", "r.yaml", "--json").json["stages"] if stage["stage"] == "quantize"
    )
    work = Path("store") / "quantize" / f"{quantize['fingerprint']}.work" / "checkpoint"
    work.mkdir(parents=True)
    (work / "model.safetensors.partial").write_bytes(os.urandom(needed["checkpoint"] - 4096))
    assert Store(Path("store")).begun("quantize", quantize["fingerprint"]) >= needed["checkpoint"] - 4096
    assert quantmint("run", "r.yaml").code == 0


def test_a_cached_run_needs_no_room(orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestra.run(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: 0)
    assert quantmint("run", "r.yaml").code == 0


@pytest.mark.parametrize(
    ("hardware", "runtime", "again"),
    [("cpu", "reference", True), ("mi300x", "reference", True), ("mi300x", "vllm", True), ("cpu", "vllm", False)],
)
@pytest.mark.usefixtures("large_disk")
def test_a_server_starts_anew_when_the_other_side_answers(
    quantmint: Quantmint, project: Path, hardware: str, runtime: str, again: bool
) -> None:
    (project / "other.yaml").write_text(
        "extends: r.yaml\nname: other\nquantization: {kv_cache: auto}\ncalibration: null\n"
        f"target: {{hardware: {hardware}}}\nevaluation: {{suite: tiny, runtime: {runtime}}}\n"
        "gate: {throughput: {min_ratio: null}}\n"
    )
    ended = quantmint("plan", "other.yaml", "--json")
    assert ended.code == 0, ended.err
    took = {stage["stage"]: stage["seconds"] for stage in ended.json["stages"]}
    start, rates = took["serve-baseline"], ended.json["costs"]["rates"]
    assert took["serve-candidate"] == (start if again else 0.0)
    if again:
        assert min(took["evaluate-baseline"], took["evaluate-candidate"]) > start
    if runtime == "reference":
        assert rates["start"] < start < 1.5 * rates["start"], "it imports our libraries, and compiles nothing"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda:1", "--for: found 'cuda:1', which has no figures, expected here, mi300x, mi325x"),
        ("her", '(did you mean "here"?)'),
        ("mi300:8", '(did you mean "mi300x"?)'),
        ("mi355x:9", '(did you mean "mi355x:8"?)'),
        ("mi300x:0", '(did you mean "mi300x:8"?)'),
    ],
)
@pytest.mark.usefixtures("large_disk", "project")
def test_a_machine_without_figures_is_refused(quantmint: Quantmint, name: str, expected: str) -> None:
    ended = quantmint("plan", "r.yaml", "--for", name)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"quantmint: --for: found {name!r}")
    assert expected in ended.err


def test_without_a_config_or_a_network(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = quantmint("plan", "llama8b-ptpc")
    assert ended.code == 2
    assert "cannot be resolved to a commit" in ended.err
    assert "--config FOLDER" in ended.err
    assert "Traceback" not in ended.err


def test_a_config_that_is_none(quantmint: Quantmint, tmp_path: Path) -> None:
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "config.json: no such file" in ended.err) == (2, True)
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "found num_hidden_layers 0" in ended.err) == (2, True)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 64,
    }
    sizes |= {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none-such", **sizes}))
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "transformers cannot build this model" in ended.err) == (2, True)


def test_a_plan_says_whose_rates_it_has(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.weights.cores", lambda: 64)
    ended = quantmint("plan", "tiny-ptpc")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "times on this machine (" in said
    assert "measured for a second" in said
    monkeypatch.setattr("quantmint.pipeline.stages.rates.measured", _fails)
    said = " ".join(quantmint("plan", "tiny-ptpc").out.split())
    assert "that is ANOTHER machine" in said


def _fails(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_a_target_without_figures_is_planned_for_this_machine() -> None:
    from quantmint.pipeline.runs.forecast import machine_elsewhere

    assert machine_elsewhere(None, "cuda", 1) is None
    elsewhere = machine_elsewhere(None, "mi300x", 8)
    assert elsewhere is not None
    assert elsewhere.gpus == 8


@pytest.mark.usefixtures("large_disk")
def test_launches_of_the_baseline_that_are_reused_are_not_forecast(quantmint: Quantmint, project: Path) -> None:
    before = quantmint("plan", "r.yaml", "--for", "here", "--json").json
    setting = open_setting("r.yaml", store=Store(project / "store"))
    (planned,) = (planned for planned in build_plan(setting) if planned.key == "bench")
    launches = [replace(launch, started="2026-11-26T08:00:00+00:00") for launch in make_launches(4)]
    baseline_launches(setting, source_of(planned), BenchStage.version).add(launches, ())
    after = quantmint("plan", "r.yaml", "--for", "here", "--json").json
    assert (before["bench"]["launches"], after["bench"]["launches"]) == (9, 7)
    assert (after["bench"]["reused"], after["bench"]["reused_from"]) == (2, "2026-11-26T08:00:00+00:00")
    assert after["bench"]["seconds"] < before["bench"]["seconds"]
    assert after["seconds"] < before["seconds"]
    assert after["gate"]["speed"]["least"] > before["gate"]["speed"]["least"], "it shows a little less"
    text = " ".join(quantmint("plan", "r.yaml", "--for", "here").out.split())
    assert "throughput: 7 launches of" in text
    assert "2 of the baseline's launches are reused, of 2026-11-26; if the fresh ones disagree" in text
    elsewhere = quantmint("plan", "r.yaml", "--for", "mi300x", "--json").json
    assert elsewhere["bench"]["launches"] == 9, "of this machine's launches"
