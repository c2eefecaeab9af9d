"""`quantmint plan` of what is shipped, and of published shapes: without a network, weights or vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import workloads
from quantmint.pipeline.recipe.load import load_recipe, recipe_names
from quantmint.pipeline.stages.calibrate import needs_ranges

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = [name for name in recipe_names() if load_recipe(name).recipe.source.repo is not None]
LARGEST = (
    "deepseek-r1-mxfp4",
    "deepseek-r1-mxfp4-mtp",
    "deepseekv32-mxfp4",
    "deepseekv4flash-mxfp4",
    "glm5-mxfp4",
    "kimik2thinking-mxfp4",
    "kimik25-mxfp4",
    "minimaxm25-mxfp4",
    "qwen35-397b-mxfp4",
    "qwen3next-ptpc",
)
"""Recipes whose models take 10 s and more to imagine."""
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


@pytest.mark.parametrize(
    "name",
    # In the order of the test below, so that a model which both plan is imagined once.
    [pytest.param(name, marks=[pytest.mark.slow] if name in LARGEST else []) for name in dict.fromkeys(AMDS + SHIPPED)],
    scope="module",
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
    assert plan["disk"]["needed"].get("layers of GPTQ", 0) == sizes["temporary"]
    assert sizes["checkpoint"] + sizes["temporary"] == costs["quantize"]["disk"]
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
@pytest.mark.parametrize("name", AMDS, scope="module")
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
        assert plan["disk"]["needed"]["checkpoint"] == sizes["checkpoint"]
        assert sizes["checkpoint"] + sizes["temporary"] == quantize["disk"]


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
