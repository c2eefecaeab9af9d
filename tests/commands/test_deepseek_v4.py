"""DeepSeek V4 as it is published: routed experts in MXFP4, other linear weights in FP8 blocks, all scales E8M0."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.schemes.registry import dequantize
from quantmint.pipeline.serving.model.facts import facts_of_config, model_facts
from tests.commands.cards import Card, assert_card, run_shipped
from tests.commands.test_encoded_sources import stored
from tests.commands.test_integer_sources import written
from tests.oracles import EqualTo
from tests.zoo.models import build, encode_v4, table
from tests.zoo.test_predictors import ask_vllm

Quantmint = Callable[..., Any]
Tensors = dict[str, torch.Tensor]

CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
EXPERTS, OTHERS = 3 * 4 * 3, 3 * 8 + 1  # in 3 layers; the indexer of one layer has a weight in FP8
SIZES = {"head_dim": 128, "num_nextn_predict_layers": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write the model with a predictor as it is published, and as transformers dequantizes it."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder, entry = tmp_path_factory.mktemp("v4"), table()["deepseek_v4"]
    with patch.dict(entry, {"config": {**entry["config"], **SIZES}}):
        model = build("deepseek_v4", folder / "model")
    tensors = load_file(model / "model.safetensors")
    # The release's predictor has no compressor, and its own name for a norm.
    layer = {n: t for n, t in tensors.items() if n.startswith("layers.2.") and "compressor" not in n}
    renamed = {n.replace("layers.2.", "mtp.0.").replace("attn.norm", "attn.kv_norm"): t for n, t in layer.items()}
    tensors |= {n: t.clone() for n, t in renamed.items()}
    tensors |= {f"mtp.0.{name}_proj.weight": tensors["layers.0.attn.wo_b.weight"][:, :128].clone() for name in "eh"}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    published = encode_v4(model, folder / "published")
    encoded, decode = load_file(published / "model.safetensors"), Fp8Dequantize(None)._dequantize_one
    plain = {
        name: tensor if scale is None else decode(tensor, scale)
        for name, tensor in encoded.items()
        for scale in [encoded.get(f"{name.removesuffix('.weight')}.scale")]
        if not name.endswith(".scale")
    }
    assert plain.keys() == tensors.keys()
    assert all(tensor.dtype == tensors[name].dtype for name, tensor in plain.items())
    return published, written(model, folder / "plain", plain, None)


def weights(folder: Path, scheme: Callable[[str], str]) -> Tensors:
    """Return the decoded weights of the quantized modules of a checkpoint, float32, by module."""
    tensors, decoded = stored(folder), {}
    for name in tensors:
        module, _, role = name.rpartition(".")
        if role == "weight_scale":
            roles = ("weight_packed", "weight", "weight_scale")
            parts = {role: tensors[f"{module}.{role}"] for role in roles if f"{module}.{role}" in tensors}
            decoded[module] = dequantize(scheme(module), parts)
    return decoded


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4", "mxfp8"])
def test_published_v4_is_decoded(
    quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path], equal_to: EqualTo, scheme: str
) -> None:
    published, plain = sources
    made = quantmint("quantize", published, tmp_path / "out", "--scheme", scheme, "--json")
    assert made.code == 0, made.err
    exact = EXPERTS if scheme == "mxfp4" else EXPERTS + OTHERS  # none of these numbers is too wide for FP8
    assert json.loads(made.out)["exact"] == exact
    inspected = quantmint("inspect", tmp_path / "out", "--source", published)
    assert inspected.code == 0, inspected.out
    restored, original = weights(tmp_path / "out", lambda _: scheme), stored(plain)
    assert len(restored) == EXPERTS + OTHERS
    equal = [module for module, weight in restored.items() if torch.equal(weight, original[f"{module}.weight"].float())]
    assert len(equal) == exact
    same = {module: restored[module].bfloat16() for module in equal}
    equal_to("transformers' decoding of DeepSeek V4", same, {module: original[f"{module}.weight"] for module in equal})
    bytes_of = stored(published)
    if scheme == "mxfp4":
        tensors = stored(tmp_path / "out")
        for module in equal:
            assert torch.equal(tensors[f"{module}.weight_packed"], bytes_of[f"{module}.weight"].view(torch.uint8))
            assert torch.equal(tensors[f"{module}.weight_scale"], bytes_of[f"{module}.scale"].view(torch.uint8))
    carried = stored(tmp_path / "out")
    for name in (name for name in original if name.startswith("mtp.") or "norm" in name or "compressor" in name):
        assert torch.equal(carried[name], original[name]), name


@pytest.mark.parametrize("layout", ["compressed-tensors", "quark"])
def test_published_v4_keeps_its_numbers(
    quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path], layout: str
) -> None:
    """Experts in MXFP4 and the rest in FP8 blocks, as the source has them: elements by their bytes."""
    published, plain = sources
    out, blocks = tmp_path / "out", ("--exclude", "re:.*attn.*", "--exclude", "re:.*shared_experts.*")
    made = quantmint(
        "quantize", published, out, "--scheme", "mxfp4", *blocks, "--keep", "source", "--format", layout, "--json"
    )
    assert made.code == 0, made.err
    assert json.loads(made.out)["exact"] == EXPERTS + OTHERS
    inspected = quantmint("inspect", out, "--source", published)
    assert inspected.code == 0, inspected.out
    restored = weights(out, lambda module: "mxfp4" if ".experts." in module else "fp8_block")
    original, tensors, source = stored(plain), stored(out), stored(published)
    assert len(restored) == EXPERTS + OTHERS
    for module, weight in restored.items():
        assert torch.equal(weight, original[f"{module}.weight"].float()), module
        if ".experts." not in module:
            elements = (folder[f"{module}.weight"].view(torch.uint8) for folder in (tensors, source))
            assert torch.equal(*elements), module
            assert torch.equal(tensors[f"{module}.weight_scale"], source[f"{module}.scale"].float())


def test_a_predictor_in_16_bit_is_declared_under_the_names_of_servers(
    quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path]
) -> None:
    """vLLM builds the layers that are stored below ``mtp.`` as layers behind the last one, and asks by these names."""
    from compressed_tensors.utils import match_name

    made = quantmint("quantize", sources[0], tmp_path / "out", "--scheme", "mxfp4", "--format", "compressed-tensors")
    assert made.code == 0, made.err
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    for module in (
        "mtp.0.attn.wq_b",
        "model.layers.3.attn.wq_b",
        "model.layers.3.ffn.experts",
        "model.layers.3.e_proj",
    ):
        assert any(match_name(module, pattern) for pattern in ignored), module
    assert not any(match_name("model.layers.2.attn.wq_b", pattern) for pattern in ignored)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_builds_a_predictor_in_16_bit(quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path]) -> None:
    folder = run_shipped(quantmint, "deepseekv4flash-mxfp4", sources[0])
    shutil.copytree(folder, tmp_path / "served")
    made = json.loads((folder / "config.json").read_text())
    # vLLM reads the release's configuration and not transformers'; its kernels have no compressors of these sizes.
    release = json.loads((CONFIGS / "DeepSeek-V4-Flash" / "config.json").read_text())
    config = {key: made.get(key, value) for key, value in release.items() if not isinstance(value, dict)}
    config |= {"compress_ratios": [0] * 4, "rope_scaling": release["rope_scaling"]}
    config["quantization_config"] = made["quantization_config"]
    (tmp_path / "served" / "config.json").write_text(json.dumps(config))
    (line,) = ask_vllm([str(tmp_path / "served")]).values()
    assert (line["methods"], line["error"]) == ({}, None)
    assert not [name for name in line["missing"] if "experts" in name or "mtp_block.attn.w" in name]


def test_a_quantized_predictor_that_cannot_stay_so_is_refused(
    quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path]
) -> None:
    made = quantmint("quantize", sources[0], tmp_path / "out", "--scheme", "mxfp4", "--mtp", "source")
    assert made.code == 2
    assert "found source, and mtp.0." in made.err
    assert "Set `mtp: bf16`" in made.err
    assert not (tmp_path / "out").exists()


def test_the_shipped_recipe_keeps_what_is_published(quantmint: Quantmint, sources: tuple[Path, Path]) -> None:
    """Experts in MXFP4 and the rest in FP8 by blocks, as AMD's V4-Pro has them."""
    folder = run_shipped(quantmint, "deepseekv4flash-mxfp4", sources[0])
    kept = ["*compressor*", "*weights_proj", "*ffn.gate", "head", "mtp.*"]
    card = Card(kept, "fp8_block", {"*ffn.experts*": "mxfp4"})
    counts = assert_card(folder, card)
    assert (counts["mxfp4"], counts["fp8_block"]) == (EXPERTS, OTHERS)


def test_published_v4_is_planned_from_its_configuration(sources: tuple[Path, Path]) -> None:
    """Encodings are those of the release; some names are transformers's, which has others than the release."""
    real = open_checkpoint(sources[0])
    _, imagined = imagine(sources[0])
    for structure in (imagined, read_structure(sources[0], real.tensors)):
        assert structure.undecodable is None
        encodings = (structure.weights[module].encoded for module in structure.linear)
        counted = Counter(None if encoded is None else encoded.encoding for encoded in encodings)
        assert counted == {"mxfp4": EXPERTS, "fp8_block_e8m0": OTHERS}


def test_weights_of_v4_are_counted_as_they_are_stored(sources: tuple[Path, Path]) -> None:
    config = json.loads((sources[1] / "config.json").read_text())
    totals: list[Counter[str]] = []
    for facts in (model_facts(sources[1]), facts_of_config(config)):
        # The table of experts by token has 64-bit numbers here, and no parameters in the count.
        pieces = (piece for piece in facts.module_weights if piece.role != "mtp" and "gate" not in piece.name)
        totals.append(Counter())
        for piece in pieces:
            totals[-1][piece.split] += piece.nbytes
    assert totals[0] == totals[1]
    assert totals[0].keys() == {"vocabulary", "tensor", "experts", "shared", "copied"}
    published = facts_of_config(json.loads((sources[0] / "config.json").read_text()))
    assert (published.schemes, published.expert_schemes) == (("fp8_block", "mxfp4"), ("mxfp4",))


@pytest.mark.parametrize(
    ("module", "expected"), [("attn.wq_a", "F8_E4M3 [128, 128]"), ("ffn.experts.1.w2", "I8 [128, 64]")]
)
def test_a_weight_of_v4_without_its_scale_is_named(
    quantmint: Quantmint, tmp_path: Path, sources: tuple[Path, Path], module: str, expected: str
) -> None:
    tensors = stored(sources[0])
    del tensors[f"layers.1.{module}.scale"]
    folder = written(sources[0], tmp_path / "broken", tensors, None)
    refused = quantmint("quantize", folder, tmp_path / "out", "--scheme", "ptpc_fp8")
    assert refused.code == 2
    assert f"layers.1.{module}.weight: it is {expected}, but there is no" in refused.err
