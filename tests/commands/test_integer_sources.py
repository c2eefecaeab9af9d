"""Sources in INT4 of AWQ, GPTQ and compressed-tensors with zero points, decoded bit for bit as their libraries do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantmint.calibration.encodings import recognise
from tests.commands.test_encoded_sources import assert_imagined, stored
from tests.oracles import EqualTo

Quantmint = Callable[..., Any]
Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word from its lowest bits on (AutoAWQ 0.2.9)
DECLARED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq-symmetric": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True},
    "gptq_v2": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2",
    },
    "asymmetric": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False,
                },
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
    },
}  # fmt: skip


ORACLES = dict.fromkeys(DECLARED, "GPTQ's formula") | {
    "awq": "compressed-tensors' converter of AutoAWQ",
    "asymmetric": "compressed-tensors' decoding of pack-quantized",
}


def words_of(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack numbers 0 to 15, [n, 8m], eight in an int32 along the last dimension, number ``order[k]`` at place k."""
    parts = numbers.long().unflatten(-1, (-1, 8))
    words = sum(parts[..., number] << (4 * place) for place, number in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def rounded(weight: torch.Tensor, kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Round [O, I] in groups of inputs: numbers [O, I] and zero points [n, O], 0 to 15, scales [n, O], groups [I]."""
    outputs, inputs = weight.shape
    group_of = torch.arange(inputs) // GROUP
    if kind == "gptq-act-order":
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    scale = torch.zeros(inputs // GROUP, outputs)
    zeros = torch.zeros(inputs // GROUP, outputs, dtype=torch.int32)
    for group in range(inputs // GROUP):
        part = weight[:, group_of == group].float()
        if kind in ("gptq-symmetric", "gptq-act-order"):
            scale[group], zeros[group] = part.abs().amax(1) / 7.5, 8
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[group] = (high - low).clamp(min=1e-6) / 15
            zeros[group] = (-low / scale[group]).round().clamp(1 if kind == "gptq" else 0, 15).int()
    scale = scale.half()
    numbers = (weight.float() / scale.float()[group_of].t()).round() + zeros[group_of].t()
    return numbers.clamp(0, 15).int(), zeros, scale, group_of.int()


def encoded(weight: torch.Tensor, kind: str, seed: int) -> Tensors:
    """Return what a tool stores of a weight, by the last part of the tensors' names."""
    numbers, zeros, scale, group_of = rounded(weight, kind, seed)
    if kind == "asymmetric":
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        zero_point = (zeros.t() - 8).to(torch.int8).contiguous()
        return {
            "weight_packed": pack_to_int32((numbers - 8).to(torch.int8), 4),
            "weight_scale": scale.t().bfloat16().contiguous(),
            "weight_zero_point": pack_to_int32(zero_point, 4, packed_dim=0).contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
    if kind == "awq":
        return {
            "qweight": words_of(numbers.t(), AWQ_ORDER).contiguous(),
            "qzeros": words_of(zeros, AWQ_ORDER),
            "scales": scale,
        }
    bias = {"bias": torch.zeros(len(weight), dtype=torch.float16)} if kind == "gptq-act-order" else {}
    return {
        **bias,  # AutoGPTQ stored them for each module
        "qweight": words_of(numbers).t().contiguous(),
        "qzeros": words_of(zeros if kind == "gptq_v2" else zeros - 1),
        "scales": scale,
        "g_idx": group_of,
    }


def decoded(parts: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Decode a stored weight by compressed-tensors, and GPTQ by its formula: bfloat16 [O, I]."""
    if kind.startswith("gptq"):
        places = torch.arange(8, dtype=torch.int32) * 4
        numbers = ((parts["qweight"].unsqueeze(1) >> places[:, None]) & 15).flatten(0, 1)
        zeros = ((parts["qzeros"].unsqueeze(2) >> places) & 15).flatten(1) + (kind != "gptq_v2")
        order = parts["g_idx"].long()
        weight = parts["scales"].float()[order] * (numbers - zeros[order])
        return weight.t().bfloat16().contiguous()
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationScheme

    group = DECLARED["asymmetric"]["config_groups"]["group_0"]
    tensors = {f"a.{name}": part for name, part in parts.items()}
    if kind == "awq":
        tensors = AutoAWQConverter(group_size=GROUP).process(tensors)
    parts = {name.removeprefix("a."): part for name, part in tensors.items()}
    parts["weight_scale"] = parts["weight_scale"].float()  # or its products are rounded to 16 bit before bfloat16
    library = BaseCompressor.load_from_registry("pack-quantized")
    weight = library.decompress(parts, QuantizationScheme.model_validate(group))["weight"]
    return torch.as_tensor(weight).bfloat16().contiguous()


def written(folder: Path, out: Path, tensors: Tensors, declared: Mapping[str, Any] | None) -> Path:
    """Write a model like that of ``folder`` with these tensors and this ``quantization_config``."""
    out.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copy(path, out / path.name)
    config = json.loads((folder / "config.json").read_text())
    config |= {} if declared is None else {"quantization_config": declared}
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def sources(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a model in INT4, and the same model decoded by its library; assert that we decode all numbers equally."""
    packed: Tensors = {}
    plain: Tensors = {}
    equal = total = 0
    for seed, (name, tensor) in enumerate(stored(folder).items()):
        module = name.removesuffix(".weight")
        if "layers" not in name or tensor.ndim != 2 or ".gate.weight" in name:
            packed[name] = plain[name] = tensor
            continue
        parts = encoded(tensor, kind, seed)
        packed |= {f"{module}.{last}": part for last, part in parts.items()}
        plain[name] = decoded(parts, kind)
        elements = next(f"{module}.{last}" for last in ("qweight", "weight_packed") if last in parts)
        kinds = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
        shapes = {f"{module}.{last}": (kinds[part.dtype], tuple(part.shape)) for last, part in parts.items()}
        found = recognise(shapes, elements, DECLARED[kind])
        assert found is not None
        ours = found.rule.decode(packed[elements], [packed[scale] for scale in found.scales])
        equal, total = equal + int((ours == plain[name]).sum()), total + ours.numel()
    assert equal == total > 0, f"{kind}: {equal:,} of {total:,} numbers are equal"
    return written(folder, Path("first"), packed, DECLARED[kind]), written(folder, Path("plain"), plain, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECLARED)
def test_an_integer_source_is_decoded_as_its_library_does(
    quantmint: Quantmint, models: Models, equal_to: EqualTo, kind: str
) -> None:
    first, plain = sources(models("llama"), kind)
    if kind != "gptq-act-order":  # a configuration does not tell of needless biases
        assert_imagined(first)
    for source, out in ((first, "second"), (plain, "expected")):
        made = quantmint("quantize", source, out, "--scheme", "ptpc_fp8", "--exclude", "re:.*layers\\.1\\.mlp.*")
        assert made.code == 0, made.err
    equal_to(ORACLES[kind], stored(Path("second")), stored(Path("expected")))
    inspected = quantmint("inspect", "second", "--source", first)
    assert inspected.code == 0, inspected.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "asymmetric"])
def test_an_integer_mixture_is_rounded_by_gptq(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], equal_to: EqualTo, kind: str
) -> None:
    first, plain = sources(models("qwen3-moe"), kind)
    more = ("--scheme", "mxfp4", "--format", "quark", "--algorithm", "gptq", *words)
    for source, out in ((first, "second"), (plain, "expected")):
        made = quantmint("quantize", source, out, *more)
        assert made.code == 0, made.err
    equal_to(ORACLES[kind], stored(Path("second")), stored(Path("expected")))
    inspected = quantmint("inspect", "second", "--source", first)
    assert inspected.code == 0, inspected.out


def test_schemes_are_chosen_for_an_integer_source_with_an_fp8_cache(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], equal_to: EqualTo
) -> None:
    first, plain = sources(models("llama"), "gptq")
    more = ("--scheme", "auto", "--from", "ptpc_fp8,mxfp4", "--bits", "6", "--kv-cache", "fp8", *words)
    for source, out in ((first, "second"), (plain, "expected")):
        made = quantmint("quantize", source, out, *more)
        assert made.code == 0, made.err
    equal_to(ORACLES["gptq"], stored(Path("second")), stored(Path("expected")))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("awq", {"version": "gemv"}, "awq, gemv of 4 bits"),
        ("gptq", {"bits": 8}, "gptq, gptq of 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq, marlin of 4 bits"),
    ],
)
def test_another_layout_of_integers_is_refused(
    quantmint: Quantmint, models: Models, kind: str, change: Mapping[str, Any], reason: str
) -> None:
    first, _ = sources(models("llama"), kind)
    config = json.loads((first / "config.json").read_text())
    config["quantization_config"] |= change
    (first / "config.json").write_text(json.dumps(config))
    refused = quantmint("quantize", first, "second", "--scheme", "ptpc_fp8")
    assert refused.code == 2
    assert reason in refused.err
    assert not Path("second").exists()
