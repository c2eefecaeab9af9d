"""quantmint search on a mixture of experts: what is measured, printed, written, drawn and shared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quantmint import recipes

TINY = Path(recipes.__path__[0]) / "tiny" / "model"
LAYER = "model.layers.1"
MEASURED = ("--calibration", "tiny", "--samples", 6, "--sequence-length", 48, "--device", "cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=2048,
        max_position_embeddings=256,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Qwen3MoeForCausalLM(config).bfloat16()
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_mixture_s_frontier(mixture: Path, tmp_path: Path, quantmint: Callable[..., Any]) -> None:
    store, written, drawn = tmp_path / "store", tmp_path / "auto.yaml", tmp_path / "frontier.svg"
    asked = ("search", mixture, *MEASURED, "--store", store)
    found = quantmint(*asked, "--json", "--bits", 6, "--write", written, "--plot", drawn).json
    groups = {group["name"]: group for group in found["groups"]}
    # What vLLM loads with one scheme is one choice: all experts of a layer, q with k and v; the router is none.
    kinds = ("self_attn.{q_proj, k_proj, v_proj}", "self_attn.o_proj", "mlp.experts.*")
    assert groups.keys() == {f"model.layers.{layer}.{kind}" for layer in (0, 1) for kind in kinds}
    assert groups[f"{LAYER}.mlp.experts.*"]["weights"] == 4 * 3 * 64 * 32
    for group in groups.values():
        costs = {scheme: each["cost"] for scheme, each in group["schemes"].items()}
        assert costs["mxfp4"] > costs["mxfp4_fp8"] > costs["ptpc_fp8"] > 0
        assert group["schemes"]["mxfp4"]["bits"] == 4.25 * group["weights"]
    assert found["frontier"][0]["groups"] == {"mxfp4_fp8": 6}
    assert found["frontier"][-1]["groups"] == {"ptpc_fp8": 6}
    assert found["choice"]["bits"] <= 6
    assert yaml.safe_load(written.read_text())["quantization"].keys() == {"scheme", "overrides"}
    assert drawn.read_text().lstrip().startswith("<?xml")
    # Another budget measures nothing.
    [entry] = (store / "sensitivity").iterdir()
    began = (entry / "record.json").stat().st_mtime_ns
    told = quantmint(*asked, "--bits", 5).out
    assert "predicted KL" in told
    assert "  scheme: mxfp4_fp8" in told
    assert [(entry / "record.json").stat().st_mtime_ns] == [began]


@pytest.mark.slow
def test_what_gptq_rounds_costs_less_and_stacked_experts_cost_what_they_did(
    mixture: Path, tmp_path: Path, quantmint: Callable[..., Any]
) -> None:
    sections = {
        "source": {"folder": str(mixture)},
        "calibration": {"set": "tiny", "samples": 6, "sequence_length": 48},
        "target": {"hardware": "mi355x", "gpus": 1, "workload": "tiny", "max_model_len": 256},
        "evaluation": {"suite": "tiny"},
        "gate": {"throughput": {"min_ratio": None}},
    }
    costs: list[dict[str, float]] = []
    for algorithm in ("none", "gptq"):
        auto = {"scheme": "auto", "from": ["mxfp4_fp8", "ptpc_fp8"], "bits": 5, "format": "quark"}
        recipe = {"name": algorithm, **sections, "quantization": {**auto, "algorithm": algorithm}}
        (tmp_path / f"{algorithm}.yaml").write_text(yaml.safe_dump(recipe))
        asked = ("search", tmp_path / f"{algorithm}.yaml", "--store", tmp_path / "store", "--device", "cpu", "--json")
        costs.append({each["name"]: each["schemes"]["mxfp4_fp8"]["cost"] for each in quantmint(*asked).json["groups"]})
    nearest, carried = costs
    assert nearest.keys() == carried.keys()
    for group, cost in nearest.items():
        assert carried[group] == cost if "experts" in group else carried[group] < 0.9 * cost, group


def test_a_file_to_write_needs_bits_to_write(quantmint: Callable[..., Any]) -> None:
    assert "--write: found it without --bits" in quantmint("search", "model", "--write", "auto.yaml").err


@pytest.mark.slow
def test_a_checkpoint_by_a_budget_says_what_was_chosen(
    mixture: Path, tmp_path: Path, quantmint: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    auto = ("--scheme", "auto", "--from", "mxfp4,ptpc_fp8", "--bits")
    made = quantmint("quantize", mixture, out, *auto, 6, *MEASURED, "--json").json
    assert made["auto"]["bits"] <= 6
    assert sum(made["auto"]["groups"].values()) == 6
    said = yaml.safe_load((out / "quantmint" / "overrides.yaml").read_text())["quantization"]
    again = [each for one in said["overrides"] for module in one["modules"] for each in (f"{module}={one['scheme']}",)]
    options = [word for text in again for word in ("--override", text)]
    plain = quantmint("quantize", mixture, tmp_path / "plain", "--scheme", said["scheme"], *options, "--json").json
    assert plain["schemes"] == made["schemes"]
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert "nothing to do" in quantmint("quantize", mixture, out, *auto, 6, *MEASURED).out
    assert "quantize.settings.bits: 6" in quantmint("quantize", mixture, out, *auto, 7, *MEASURED).err
