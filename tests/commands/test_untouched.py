"""Weights whose source has the target's format already keep their bytes, in every layout that stores them alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands.test_encoded_sources import stored
from tests.commands.test_integer_sources import sources

Quantmint = Callable[..., Any]
Models = Callable[..., Path]

CASES = [
    ("ptpc_fp8", "compressed-tensors", "quark"),
    ("ptpc_fp8", "quark", "compressed-tensors"),
    ("fp8_block", "compressed-tensors", "quark"),
    ("fp8_block", "quark", "compressed-tensors"),
    ("mxfp8", "compressed-tensors", "compressed-tensors"),
    ("mxfp4", "compressed-tensors", "quark"),
    ("mxfp4", "quark", "compressed-tensors"),
    ("nvfp4", "compressed-tensors", "compressed-tensors"),
    ("w4a16", "compressed-tensors", "compressed-tensors"),
]


def of_linear(folder: Path) -> dict[str, torch.Tensor]:
    """Return the stored tensors of linear modules; those of packed weights by their plain names."""
    return {
        name.replace("weight_packed", "weight"): tensor
        for name, tensor in stored(folder).items()
        if ("_proj.weight" in name and "input" not in name) or "weight_global_scale" in name
    }


@pytest.mark.parametrize(("scheme", "first", "second"), CASES)
def test_what_has_the_format_keeps_its_bytes(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], scheme: str, first: str, second: str
) -> None:
    more = ("--scheme", scheme, *(words if scheme == "nvfp4" else ()))
    more += ("--exclude", "re:.*self_attn.*") if scheme == "fp8_block" else ()
    made = quantmint("quantize", models("llama", sharded=True), "first", *more, "--format", first)
    assert made.code == 0, made.err
    scales = {name: tensor for name, tensor in stored(Path("first")).items() if name.endswith("weight_scale")}
    if scheme == "ptpc_fp8":  # as file-to-file tools write them, and to numbers that no kernel would choose
        for shard in Path("first").glob("*.safetensors"):
            tensors = load_file(shard)
            save_file({n: t.float() * 1.01 if n in scales else t for n, t in tensors.items()}, shard, {"format": "pt"})
    made = quantmint("quantize", "first", "second", *more, "--format", second)
    assert made.code == 0, made.err
    before, after = of_linear(Path("first")), of_linear(Path("second"))
    assert before.keys() == after.keys()
    assert len(scales) == (6 if scheme == "fp8_block" else 14)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name
    assert f"{len(scales)} modules hold their source's very numbers" in made.out
    inspected = quantmint("inspect", "second", "--source", "first")
    assert inspected.code == 0, inspected.out


@pytest.mark.parametrize("scheme", ["mxfp4", "ptpc_fp8"])
def test_bytes_that_are_no_numbers_do_not_pass(quantmint: Quantmint, models: Models, scheme: str) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", scheme)
    assert made.code == 0, made.err
    path = Path("first/model.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight_scale" if scheme == "mxfp4" else "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 0] = 255  # NaN, as a scale of MXFP4 and as a number of FP8
    save_file(tensors, path, {"format": "pt"})
    refused = quantmint("quantize", "first", "second", "--scheme", scheme, "--format", "quark")
    assert refused.code == 5
    assert "holds numbers that are not finite" in refused.err


def test_gptq_rounds_what_it_may_change(quantmint: Quantmint, models: Models, words: tuple[str, ...]) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "mxfp4")
    assert made.code == 0, made.err
    made = quantmint("quantize", "first", "second", "--scheme", "mxfp4", "--algorithm", "gptq", *words)
    assert made.code == 0, made.err
    assert json.loads(Path("second/config.json").read_text())["quantization_config"]
    inspected = quantmint("inspect", "second", "--source", "first")
    assert inspected.code == 0, inspected.out


@pytest.mark.parametrize(("scheme", "layout"), [("ptpc_fp8", "quark"), ("fp8_block", "compressed-tensors")])
def test_an_excluded_layer_stays_as_the_source_has_it(
    quantmint: Quantmint, models: Models, scheme: str, layout: str
) -> None:
    whole = ("--exclude", "re:.*self_attn.*", "--format", layout)
    made = quantmint("quantize", models("llama"), "first", "--scheme", scheme, *whole)
    assert made.code == 0, made.err
    more = ("--scheme", "mxfp4", *whole, "--exclude", "re:.*layers[.]1[.]mlp.*")
    for out, keep in (("inflated", "bf16"), ("second", "source")):
        made = quantmint("quantize", "first", out, *more, "--keep", keep)
        assert made.code == 0, made.err
        inspected = quantmint("inspect", out, "--source", "first")
        assert inspected.code == 0, inspected.out
    assert "3 modules hold their source's very numbers" in made.out
    before, after, inflated = (of_linear(Path(folder)) for folder in ("first", "second", "inflated"))
    layer = [name for name in before if "layers.1.mlp" in name]
    assert len(layer) == 3 * 2
    for name in layer:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
        assert name.endswith("_scale") or inflated[name].dtype == torch.bfloat16
    declared = json.loads(Path("second/config.json").read_text())["quantization_config"]
    assert declared != json.loads(Path("inflated/config.json").read_text())["quantization_config"]
    assert not any("mlp" in name for name in declared["exclude" if layout == "quark" else "ignore"])


def test_what_a_layout_cannot_declare_is_not_left_in_it(quantmint: Quantmint, models: Models) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "mxfp8")
    assert made.code == 0, made.err
    more = ("--format", "quark", "--exclude", "re:.*layers[.]1[.]mlp.*", "--keep", "source")
    refused = quantmint("quantize", "first", "second", "--scheme", "mxfp4", *more)
    assert refused.code == 2
    assert "encoding mxfp8 has no declaration in the layout quark" in refused.err


def test_gptq_leaves_what_stays_as_the_source_has_it(
    quantmint: Quantmint, models: Models, words: tuple[str, ...]
) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "ptpc_fp8")
    assert made.code == 0, made.err
    more = ("--scheme", "mxfp4", "--exclude", "re:.*layers[.]1[.].*", "--keep", "source", "--algorithm", "gptq", *words)
    made = quantmint("quantize", "first", "second", *more)
    assert made.code == 0, made.err
    inspected = quantmint("inspect", "second", "--source", "first")
    assert inspected.code == 0, inspected.out
    before, after = (of_linear(Path(folder)) for folder in ("first", "second"))
    layer = [name for name in before if "layers.1." in name]
    assert len(layer) == 7 * 2
    for name in layer:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def test_what_no_layout_declares_cannot_stay(quantmint: Quantmint, models: Models) -> None:
    sources(models("llama"), "awq")
    more = ("--scheme", "mxfp4", "--exclude", "re:.*layers[.]1[.]mlp.*", "--keep", "source")
    refused = quantmint("quantize", "first", "second", *more)
    assert refused.code == 2
    assert "--keep: found source for model.layers.1.mlp.down_proj, whose encoding awq has no declaration" in refused.err
