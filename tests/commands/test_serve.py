"""`quantmint serve`: what it would run, in every form, and what it refuses; served with a stand-in for vLLM."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
MIXTRAL = CONFIGS / "Mixtral-8x7B-Instruct-v0.1"
LLAMA = CONFIGS / "Llama-3.1-8B-Instruct"
Quantmint = Callable[..., Any]

KEYS = (
    "env argv replicas tensor_parallel_size pipeline_parallel_size data_parallel_size expert_parallel memory host "
    "reasons warnings processes facts target vllm_version"
)


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(explicit: str | None = None, **_: object) -> None:
        raise UserError(f"no vLLM found: {explicit}")

    monkeypatch.setattr("quantmint.pipeline.runs.serving.find_vllm", none_here)


def test_json(quantmint: Quantmint) -> None:
    ended = quantmint(
        "serve", MIXTRAL, "--target", "mi300x:8", "--workload", "throughput", "--vllm-version", "0.24.0", "--json"
    )
    assert ended.code == 0, ended.err
    plan = ended.json
    assert plan.keys() >= set(KEYS.split())
    assert plan["memory"].keys() >= {"weights", "kv_cache", "kv_tokens"}
    assert plan["facts"].keys() >= {"family", "architecture", "parameters", "weights"}
    assert all(one.keys() >= {"name", "expected", "why", "source"} for one in plan["host"])
    assert all(one[key] for one in plan["reasons"] for key in ("knob", "value", "why", "source"))
    assert all(one.keys() >= {"node", "role", "replica", "gpus", "port", "env", "argv"} for one in plan["processes"])
    assert plan["argv"][:3] == ["vllm", "serve", str(MIXTRAL)]
    assert (plan["vllm_version"], plan["target"], plan["profile"]) == ("0.24.0", "mi300x:8", "throughput")
    assert plan["facts"]["family"] == "moe"
    assert plan["processes"][0]["port"] == 8000
    assert len({tuple(one["gpus"]) for one in plan["processes"]}) == len(plan["processes"])
    assert "no *.safetensors" in plan["warnings"][0]


def test_every_form_is_the_same_launch(quantmint: Quantmint) -> None:
    given = (
        "serve",
        LLAMA,
        "--target",
        "mi355x:2",
        "--vllm-version",
        "0.33.0",
        "--concurrency",
        "16",
        "--workload",
        "latency",
    )
    plan = quantmint(*given, "--json").json
    script = quantmint(*given, "--shell").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert shlex.join(plan["argv"][:3]) in " ".join(script.replace("\\\n", " ").split())  # lines end by their length
    for name, value in plan["env"].items():
        assert f"export {name}={shlex.quote(value)}\n" in script
    service = yaml.safe_load(quantmint(*given, "--compose", "--image", "ours:1").out)["services"]["vllm"]
    assert [*service["entrypoint"], *service["command"]][: len(plan["argv"])] == plan["argv"]
    assert service["image"] == "ours:1"
    deployment = yaml.safe_load(quantmint(*given, "--kubernetes", "--volume-claim", "models").out)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [*container["command"], *container["args"]][: len(plan["argv"])] == plan["argv"]
    assert "claimName: models" in quantmint(*given, "--kubernetes", "--volume-claim", "models").out
    explained = quantmint(*given, "--explain").out
    for reason in plan["reasons"]:
        assert reason["knob"] in explained
        assert reason["source"] in " ".join(explained.split())
    short = quantmint(*given, "--dry-run").out
    assert script in short
    assert len(short) < len(explained) + len(script)


def test_options_reach_the_plan(quantmint: Quantmint) -> None:
    def plan(*more: object) -> dict[str, Any]:
        ended = quantmint("serve", LLAMA, "--target", "mi300x:2", "--vllm-version", "0.33.0", "--json", *more)
        assert ended.code == 0, ended.err
        return dict(ended.json)

    def value(made: dict[str, Any], flag: str) -> str:
        return str(made["argv"][made["argv"].index(flag) + 1])

    assert value(plan("--set", "max-num-seqs=77"), "--max-num-seqs") == "77"
    assert "--max-num-seqs" not in plan("--set", "--max-num-seqs=false")["argv"]
    assert plan("--set", "VLLM_ROCM_USE_AITER=0")["env"]["VLLM_ROCM_USE_AITER"] == "0"
    assert value(plan("--max-model-len", 4096), "--max-model-len") == "4096"
    assert value(plan("--kv-cache-dtype", "fp8"), "--kv-cache-dtype").startswith("fp8")
    assert plan("--set", "tensor-parallel-size=2")["tensor_parallel_size"] == 2
    assert plan("--port", 9000)["processes"][0]["port"] == 9000
    assert plan("--pack", 2)["servers_per_gpu"] == 2
    assert value(plan("--served-model-name", "org/mine"), "--served-model-name") == "org/mine"
    said = json.loads(value(plan("--speculative", "eagle3:/models/draft:2"), "--speculative-config"))
    assert said == {"method": "eagle3", "model": "/models/draft", "num_speculative_tokens": 2}
    assert (
        plan("--workload", "long-context")["profile"]
        == plan("--workload", "long-context", "--concurrency", 9)["profile"]
    )


def test_a_recipe_without_a_checkpoint_is_planned_for(quantmint: Quantmint, project: Path) -> None:
    recipe = (project / "r.yaml").read_text() + "serve: {knobs: {--max-num-seqs: 33}, profile: offline}\n"
    (project / "r.yaml").write_text(recipe)
    plan = quantmint("serve", "r.yaml", "--vllm-version", "0.33.0", "--json").json
    assert plan["argv"][2] == str(project / "published" / "r")
    assert "r has made no checkpoint yet" in plan["warnings"][0]
    assert (plan["facts"]["quantization"], plan["facts"]["kv_cache_scheme"]) == ("ptpc_fp8", "fp8")
    assert plan["argv"][plan["argv"].index("--max-num-seqs") + 1] == "33"
    assert (plan["target"], plan["profile"]) == ("mi300x:1", "offline")
    baseline = quantmint("serve", "r.yaml", "--baseline", "--vllm-version", "0.33.0", "--json").json
    assert baseline["argv"][2] == str(project / "model")
    assert (baseline["facts"]["quantization"], baseline["warnings"][:1]) != ("ptpc_fp8", plan["warnings"][:1])


@pytest.mark.slow
def test_a_recipe_serves_what_it_made(quantmint: Quantmint, project: Path) -> None:
    given = ("serve", "r.yaml", "--vllm-version", "0.33.0", "--json")
    recipe = (project / "r.yaml").read_text().replace("kv_cache: fp8", "kv_cache: auto")
    (project / "r.yaml").write_text(recipe)
    ran = quantmint("run", "r.yaml", "--until", "quantize", "--json")
    assert ran.code == 0, ran.err
    made = Path(ran.json["stages"][-1]["path"]) / "checkpoint"
    plan = quantmint(*given).json
    assert plan["argv"][2] == str(made)
    assert plan["facts"]["counted"] is False
    assert not any("only planned" in warning for warning in plan["warnings"])
    # Another scheme, and the checkpoint in the store is no more what the recipe says.
    (project / "r.yaml").write_text(recipe.replace("ptpc_fp8", "mxfp4_weight_only"))
    assert quantmint(*given).json["argv"][2] == str(project / "published" / "r")


def test_shipped_recipes_are_planned_for_without_a_network(quantmint: Quantmint) -> None:
    folder = CONFIGS / "Llama-3.1-405B-Instruct"
    ended = quantmint("serve", "llama405b-fp8kv", "--config", folder, "--vllm-version", "0.33.0", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["facts"]["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("no/such/folder",), "MODEL: found 'no/such/folder', expected a folder with a model"),
        (("lama8b-ptpc",), 'did you mean "llama8b-ptpc"?'),
        ((LLAMA, "--target", "mi300"), "expected one of"),
        ((LLAMA, "--workload", "throughputs"), "did you mean 'throughput'"),
        ((LLAMA, "--set", "max-num-sqs=3"), 'did you mean "--max-num-seqs"?'),
        ((LLAMA, "--set", "--max-num-seqs=many"), "--max-num-seqs is 'many': expected a whole number"),
        ((LLAMA, "--speculative", "eagle3:draft:many"), "expected METHOD[:MODEL]:TOKENS"),
        ((LLAMA, "--max-model-len", "9999999"), "more than the model's context"),
        ((LLAMA, "--baseline"), "expected a recipe"),
    ],
)
def test_what_it_refuses(quantmint: Quantmint, arguments: tuple[object, ...], expected: str) -> None:
    ended = quantmint(
        "serve",
        "--vllm-version",
        "0.33.0",
        "--json",
        *arguments,
        *(() if "--target" in arguments else ("--target", "mi300x:1")),
    )
    assert ended.code == 2
    assert expected in ended.err
    assert expected in ended.json["error"]
    assert "Traceback" not in ended.err


def test_forms_exclude_each_other(quantmint: Quantmint) -> None:
    ended = quantmint("serve", LLAMA, "--shell", "--compose")
    assert ended.code == 2
    assert "found --shell and --compose, expected one of them" in ended.err


def test_nothing_is_served_without_weights_or_vllm(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no vLLM found" in quantmint("serve", LLAMA, "--target", "cpu").err
    version = quantmint("serve", LLAMA, "--target", "cpu", "--vllm-version", "0.33.0")
    assert (version.code, "--vllm-version: 0.33.0 is planned for with --dry-run" in version.err) == (2, True)
    typed = quantmint("serve", LLAMA, "--target", "cpu", "--vllm", "0.33.0")
    assert (typed.code, "--vllm: found the version 0.33.0, expected the `vllm` command" in typed.err) == (2, True)
    wrong = quantmint("serve", LLAMA, "--target", "cpu", "--vllm-version", "newest", "--dry-run")
    assert (wrong.code, "--vllm-version: found 'newest', expected a version" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("target", "given", "named", "beside"),
    [
        ("h100:2", {"CUDA_VISIBLE_DEVICES": "4,5"}, "4,5", {}),
        ("h100:1", {"CUDA_VISIBLE_DEVICES": "GPU-5d1e, GPU-77aa"}, "GPU-5d1e", {}),
        ("mi300x:2", {"CUDA_VISIBLE_DEVICES": "6,7"}, "6,7", {}),
        ("mi300x:2", {"HIP_VISIBLE_DEVICES": "4,5"}, "4,5", {}),
        ("mi300x:2", {"ROCR_VISIBLE_DEVICES": "4,5"}, "0,1", {"ROCR_VISIBLE_DEVICES": "4,5"}),
        (
            "mi300x:1",
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"},
            "1",
            {"ROCR_VISIBLE_DEVICES": "4,5"},
        ),
        ("mi300x:2", {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}, "0,1", {}),  # ROCm reads them as unset
        ("mi300x:2", {}, "0,1", {}),
    ],
)
def test_a_launch_has_the_gpus_that_its_caller_has(
    quantmint: Quantmint,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    given: dict[str, str],
    named: str,
    beside: dict[str, str],
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    launch = ("serve", LLAMA, "--target", target, "--vllm-version", "0.33.0")
    processes = quantmint(*launch, "--json").json["processes"]
    assert ",".join(process["env"]["CUDA_VISIBLE_DEVICES"] for process in processes) == named
    for process in processes:
        assert beside.items() <= process["env"].items()
        assert "HIP_VISIBLE_DEVICES" not in process["env"]
    script = quantmint(*launch, "--shell").out
    for process in processes:
        assert f"CUDA_VISIBLE_DEVICES={process['env']['CUDA_VISIBLE_DEVICES']}" in script


def test_a_plan_for_more_gpus_than_are_visible_says_so(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    plan = quantmint("serve", LLAMA, "--target", "h100:4", "--vllm-version", "0.33.0", "--json").json
    expected = "planned for GPUs from 0 on: CUDA_VISIBLE_DEVICES=4,5 leaves 2 GPUs, expected"
    assert any(expected in warning for warning in plan["warnings"])
