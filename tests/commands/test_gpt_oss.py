"""gpt-oss: experts stacked with gate and up in turns, and biases, in 16 bit and in MXFP4 as it is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.pipeline.quantize.schemes.registry import KERNELS, dequantize
from tests.commands.cards import Card, assert_card, run_shipped
from tests.commands.test_encoded_sources import assert_imagined, stored
from tests.commands.test_integer_sources import written
from tests.oracles import EqualTo

Quantmint = Callable[..., Any]
Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

EXPERTS = 4
STACKS = ("gate_up_proj", "down_proj")
DECLARED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def with_numbers(tensors: Tensors) -> Tensors:
    """Replace biases and sinks, which transformers makes zeros, by random numbers."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.ndim < 3 and "bias" in name
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture
def sources(models: Models) -> tuple[Path, Path]:
    """Write gpt-oss in MXFP4, and the same model as transformers dequantizes it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    published: Tensors = {}
    plain: Tensors = {}
    for name, tensor in with_numbers(stored(models("gpt-oss"))).items():
        if name.rpartition(".")[2] not in STACKS:
            published[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        parts = KERNELS["mxfp4"].compute(tensor.mT.reshape(experts * outputs, inputs), None)
        published[f"{name}_blocks"] = parts["weight_packed"].view(experts, outputs, inputs // 32, 16)
        published[f"{name}_scales"] = parts["weight_scale"].view(experts, outputs, inputs // 32)
        plain[name] = convert_moe_packed_tensors(published[f"{name}_blocks"], published[f"{name}_scales"]).contiguous()
        assert plain[name].shape == tensor.shape
    return written(models("gpt-oss"), Path("published"), published, DECLARED), written(
        models("gpt-oss"), Path("plain"), plain, None
    )


def decoded_experts(folder: Path, scheme: str, plain: Tensors) -> tuple[Tensors, Tensors]:
    """Assert that single experts have the biases, and about the numbers, of the stacks that they were; return both."""
    tensors = stored(folder)
    assert not any(name.endswith(("_bias", "_blocks", *STACKS)) for name in tensors)
    ours, theirs = {}, {}
    for layer in range(2):
        for stack in STACKS:
            whole = f"model.layers.{layer}.mlp.experts.{stack}"
            for expert in range(EXPERTS):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{stack}"
                parts = {role: tensors[f"{module}.{role}"] for role in ("weight", "weight_scale")}
                ours[module], theirs[module] = dequantize(scheme, parts), plain[whole][expert].t().contiguous().float()
                assert torch.equal(tensors[f"{module}.bias"], plain[f"{whole}_bias"][expert])
                assert (ours[module] - theirs[module]).norm() < 0.2 * theirs[module].norm(), module
    assert len(ours) == 2 * 2 * EXPERTS
    return {m: w.bfloat16() for m, w in ours.items()}, {m: w.bfloat16() for m, w in theirs.items()}


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "mxfp4"])
def test_gpt_oss_in_16_bit_is_quantized_expert_by_expert(
    quantmint: Quantmint, sources: tuple[Path, Path], words: tuple[str, ...], scheme: str
) -> None:
    _, plain = sources
    made = quantmint(
        "quantize", plain, "second", "--scheme", scheme, "--format", "quark", *(words if scheme == "fp8" else ())
    )
    assert made.code == 0, made.err
    ours, theirs = decoded_experts(Path("second"), scheme, stored(plain))
    assert scheme != "mxfp4" or all(torch.equal(weight, theirs[module]) for module, weight in ours.items())
    inspected = quantmint("inspect", "second", "--source", plain)
    assert inspected.code == 0, inspected.out


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4"])
def test_published_gpt_oss_keeps_its_numbers(
    quantmint: Quantmint, sources: tuple[Path, Path], equal_to: EqualTo, scheme: str
) -> None:
    published, plain = sources
    assert_imagined(published)
    made = quantmint("quantize", published, "second", "--scheme", scheme, "--format", "quark")
    assert made.code == 0, made.err
    assert f"{2 * 2 * EXPERTS} modules hold their source's very numbers" in made.out
    equal_to("transformers' decoding of gpt-oss", *decoded_experts(Path("second"), scheme, stored(plain)))
    inspected = quantmint("inspect", "second", "--source", published)
    assert inspected.code == 0, inspected.out
    if scheme == "mxfp4":
        blocks = stored(published)["model.layers.0.mlp.experts.down_proj_blocks"][3]
        assert torch.equal(stored(Path("second"))["model.layers.0.mlp.experts.3.down_proj.weight"], blocks.flatten(1))
        made = quantmint("quantize", "second", "third", "--scheme", "ptpc_fp8", "--format", "quark")
        assert made.code == 0, made.err
        equal_to("transformers' decoding of gpt-oss", *decoded_experts(Path("third"), "ptpc_fp8", stored(plain)))


def test_what_vllm_does_not_load_of_gpt_oss_is_refused(quantmint: Quantmint, sources: tuple[Path, Path]) -> None:
    published, plain = sources
    refused = quantmint("quantize", plain, "second", "--scheme", "ptpc_fp8")
    assert refused.code == 2
    assert "whose gate and up are one projection in Quark's layout only" in refused.err
    more = ("--scheme", "ptpc_fp8", "--exclude", "re:.*[.]experts[.]")
    refused = quantmint("quantize", plain, "second", *more, "--format", "quark")
    assert refused.code == 2
    assert "expected a scheme for each expert" in refused.err
    refused = quantmint("quantize", published, "second", *more)
    assert refused.code == 2
    assert "four times the bytes" in refused.err
    assert not Path("second").exists()


def test_experts_of_gpt_oss_stay_stacked_beside_quantized_attention(
    quantmint: Quantmint, sources: tuple[Path, Path]
) -> None:
    _, plain = sources
    made = quantmint("quantize", plain, "second", "--scheme", "ptpc_fp8", "--exclude", "re:.*[.]experts[.]")
    assert made.code == 0, made.err
    tensors = stored(Path("second"))
    for name, tensor in stored(plain).items():
        if "experts" in name:
            assert torch.equal(tensors[name], tensor), name
    ignored = json.loads(Path("second/config.json").read_text())["quantization_config"]["ignore"]
    assert "re:(.*\\.)?model\\.layers\\.0\\.mlp\\.experts\\..*" in ignored
    inspected = quantmint("inspect", "second", "--source", plain)
    assert inspected.code == 0, inspected.out


@pytest.mark.slow
def test_gpt_oss_is_rounded_by_gptq(
    quantmint: Quantmint, sources: tuple[Path, Path], words: tuple[str, ...], equal_to: EqualTo
) -> None:
    published, plain = sources
    more = ("--scheme", "mxfp4", "--format", "quark", "--algorithm", "gptq", *words)
    for source, out in ((published, "second"), (plain, "expected")):
        made = quantmint("quantize", source, out, *more)
        assert made.code == 0, made.err
    equal_to("transformers' decoding of gpt-oss", stored(Path("second")), stored(Path("expected")))
    inspected = quantmint("inspect", "second", "--source", published)
    assert inspected.code == 0, inspected.out


def test_the_recipe_for_mi355x_keeps_the_published_bytes(
    quantmint: Quantmint, sources: tuple[Path, Path], equal_to: EqualTo, words: tuple[str, ...]
) -> None:
    published, plain = sources
    texts = f"calibration: {{set: {Path(words[1]).absolute()}, samples: 8, sequence_length: 64}}"
    folder = run_shipped(quantmint, "gptoss120b-mxfp4-fp8", published.absolute(), texts)
    card = Card(["*lm_head", "*router*"], "mxfp4_fp8", {"*.self_attn.*": "ptpc_fp8"})
    assert assert_card(folder, card) == {"mxfp4_fp8": 16, "ptpc_fp8": 8, None: 3}
    equal_to("transformers' decoding of gpt-oss", *decoded_experts(folder, "mxfp4_fp8", stored(plain)))
    tensors = stored(folder)
    for stack in STACKS:
        blocks = stored(published)[f"model.layers.1.mlp.experts.{stack}_blocks"][2]
        assert torch.equal(tensors[f"model.layers.1.mlp.experts.2.{stack}.weight"], blocks.flatten(1))
        assert tensors[f"model.layers.1.mlp.experts.2.{stack}.input_scale"] > 0
    assert tensors["model.layers.0.self_attn.k_proj.output_scale"] > 0


def test_the_recipe_for_mi300x_rounds_nothing(
    quantmint: Quantmint, sources: tuple[Path, Path], equal_to: EqualTo
) -> None:
    published, plain = sources
    folder = run_shipped(quantmint, "gptoss120b-ptpc", published.absolute())
    card = Card(["*lm_head", "*router*", "*.self_attn.*"], "ptpc_fp8", {})
    assert assert_card(folder, card) == {"ptpc_fp8": 16, None: 11}
    equal_to("transformers' decoding of gpt-oss", *decoded_experts(folder, "ptpc_fp8", stored(plain)))
    tensors = stored(folder)
    assert all(torch.equal(tensors[name], whole) for name, whole in stored(plain).items() if "experts" not in name)
