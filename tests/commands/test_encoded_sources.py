"""Sources that are not in 16 bit: what is made of them is, byte for byte, what is made of their decoded weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.encodings import input_rounding
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from tests.oracles import EqualTo, assert_equal

Quantmint = Callable[..., Any]
Models = Callable[..., Path]
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"

CASES = [
    ("ptpc_fp8", "compressed-tensors", "float-quantized"),
    ("fp8", "compressed-tensors", "float-quantized"),
    ("fp8_block", "compressed-tensors", "float-quantized"),
    ("mxfp8", "compressed-tensors", "mxfp8-quantized"),
    ("mxfp4", "compressed-tensors", "mxfp4-pack-quantized"),
    ("nvfp4", "compressed-tensors", "nvfp4-pack-quantized"),
    ("w4a16", "compressed-tensors", "pack-quantized"),
]


def decompressed(folder: Path, out: Path, form: str) -> int:
    """Write a checkpoint's 16-bit model as compressed-tensors decompresses it; return the number of its matrices."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((folder / "config.json").read_text())
    (group,) = config.pop("quantization_config")["config_groups"].values()
    compressor, scheme = BaseCompressor.load_from_registry(form), QuantizationScheme.model_validate(group)
    out.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json" and path.name != "model.safetensors.index.json":
            shutil.copy(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, role = name.rpartition(".")
        if f"{module}.weight_scale" in tensors:
            modules.setdefault(module, {})[role] = tensor
        elif not role.endswith("_scale"):  # of the cache
            plain[name] = tensor
    for module, parts in modules.items():
        plain[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16).contiguous()
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    return len(modules)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def assert_imagined(folder: Path) -> None:
    """The configuration alone tells which tensors there are, so that a release is planned before it is fetched."""
    real = open_checkpoint(folder)
    imagined, structure = imagine(folder)
    ours, theirs = (
        {name: (info.dtype, info.shape) for name, (_, info) in checkpoint.tensors.items()}
        for checkpoint in (imagined, real)
    )
    assert {name: kind for name, kind in ours.items() if "scale" not in name} == {
        name: kind for name, kind in theirs.items() if "scale" not in name
    }
    assert {name: shape for name, (_, shape) in ours.items()} == {name: shape for name, (_, shape) in theirs.items()}
    read = read_structure(folder, real.tensors)
    assert (structure.encoded, structure.undecodable) == (read.encoded, None)
    assert structure.weights == read.weights
    assert structure.decoded_away == read.decoded_away


@pytest.mark.slow
def test_kimi_is_planned_from_its_configuration() -> None:
    """INT4 experts in groups of 32, everything else in 16 bit: the release has 594 GB."""
    checkpoint, structure = imagine(CONFIGS / "Kimi-K2-Thinking")
    assert structure.undecodable is None
    assert {encoded.encoding for encoded in structure.encoded.values()} == {"int4"}
    assert len(structure.encoded) == 60 * 384 * 3
    assert checkpoint.nbytes == pytest.approx(594e9, rel=0.002)


@pytest.mark.parametrize(("scheme", "layout", "form"), CASES, ids=lambda value: str(value))
def test_a_compressed_source_is_decoded_as_its_library_does(
    quantmint: Quantmint,
    models: Models,
    words: tuple[str, ...],
    equal_to: EqualTo,
    scheme: str,
    layout: str,
    form: str,
) -> None:
    own = ("--scheme", scheme, "--format", layout)
    own += words if scheme in ("fp8", "nvfp4") else ()
    own += ("--exclude", "re:.*self_attn.*") if scheme == "fp8_block" else ()  # of fewer rows than a block
    made = quantmint("quantize", models("llama", sharded=True), "first", *own)
    assert made.code == 0, made.err
    assert decompressed(Path("first"), Path("plain"), form) == 2 * (3 if scheme == "fp8_block" else 7)
    assert_imagined(Path("first"))
    rounding = input_rounding(json.loads(Path("first/config.json").read_text()))
    assert (rounding is None) == (scheme == "w4a16"), rounding
    # Not one that the source's bytes pass into.
    target = {"ptpc_fp8": "mxfp4", "fp8": "mxfp4", "mxfp8": "mxfp4", "mxfp4": "mxfp8"}.get(scheme, "ptpc_fp8")
    more = ("--scheme", target, "--exclude", "re:.*layers\\.1\\.mlp.*")
    for source, out in (("first", "second"), ("plain", "expected")):
        made = quantmint("quantize", source, out, *more)
        assert made.code == 0, made.err
    equal_to(f"compressed-tensors' decoding of {form}", stored(Path("second")), stored(Path("expected")))
    inspected = quantmint("inspect", "second", "--source", "first")
    assert inspected.code == 0, inspected.out


@pytest.mark.parametrize("target", ["ptpc_fp8", "fp8_block", "mxfp4"])
def test_mxfp4_becomes_fp8_and_mxfp4_without_loss(quantmint: Quantmint, models: Models, target: str) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "mxfp4", "--format", "quark")
    assert made.code == 0, made.err
    more = ("--exclude", "re:.*self_attn.*") if target == "fp8_block" else ()
    made = quantmint("quantize", "first", "second", "--scheme", target, "--format", "compressed-tensors", *more)
    assert made.code == 0, made.err
    count = 2 * (3 if target == "fp8_block" else 7)
    assert f"{count} modules hold their source's very numbers" in made.out
    assert "least SQNR" not in made.out
    inspected = quantmint("inspect", "second", "--source", "first")
    assert inspected.code == 0, inspected.out
    assert f"{count} modules hold their source's very numbers" in inspected.out


def test_a_plan_says_what_becomes_of_a_quantized_source(quantmint: Quantmint, models: Models) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "mxfp4", "--format", "quark")
    assert made.code == 0, made.err
    Path("mine.yaml").write_text(
        "name: mine\nextends: tiny-ptpc\nsource: {folder: first}\nquantization: {scheme: ptpc_fp8, kv_cache: auto}\n"
        "evaluation: {runtime: reference}\ngate: {throughput: {min_ratio: null}}\n"
    )
    planned = quantmint("plan", "mine.yaml", "--json")
    assert planned.code == 0, planned.err
    assert any("weights in MXFP4 keep their numbers where" in caution for caution in planned.json["cautions"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", "ptpc_fp8"])
def test_gptq_of_a_mixture_runs_on_the_decoded_model(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], scheme: str
) -> None:
    """Also in Quark's layout, whose tensors have other names and shapes."""
    for layout in ("quark", "compressed-tensors"):
        made = quantmint("quantize", models("qwen3-moe"), layout, "--scheme", scheme, "--format", layout)
        assert made.code == 0, made.err
        assert_imagined(Path(layout))
        more = ("--scheme", "mxfp4", "--algorithm", "gptq", *words)
        made = quantmint("quantize", layout, f"of-{layout}", *more, "--format", "quark")
        assert made.code == 0, made.err
    assert_equal(stored(Path("of-quark")), stored(Path("of-compressed-tensors")))
    inspected = quantmint("inspect", "of-quark", "--source", "quark")
    assert inspected.code == 0, inspected.out


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_source_of_modelopt_is_decoded(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], equal_to: EqualTo, algorithm: str
) -> None:
    """Its tensors are those of compressed-tensors by other names, with the reciprocal of NVFP4's scale of a tensor.

    `tests/bench/modelopt.py` holds the decoded numbers against ModelOpt's own.
    """
    scheme = {"NVFP4": "nvfp4", "FP8": "fp8"}[algorithm]
    made = quantmint("quantize", models("llama"), "first", "--scheme", scheme, "--format", "compressed-tensors", *words)
    assert made.code == 0, made.err
    as_modelopt(Path("first"), Path("source"), algorithm)
    assert_imagined(Path("source"))
    made = quantmint("quantize", "source", "second", "--scheme", "mxfp4")
    assert made.code == 0, made.err
    inspected = quantmint("inspect", "second", "--source", "source")
    assert inspected.code == 0, inspected.out
    given = stored(Path("source"))
    plain = {name: tensor for name, tensor in given.items() if tensor.dtype == torch.bfloat16 and "scale" not in name}
    for name, weight in given.items():
        if name not in plain and name.endswith(".weight"):
            plain[name] = by_hand(weight, given[f"{name}_scale"], given.get(f"{name}_scale_2"))
    Path("plain").mkdir()
    for path in Path("first").glob("*.json"):
        shutil.copy(path, Path("plain") / path.name)
    config = json.loads(Path("plain/config.json").read_text())
    del config["quantization_config"]
    Path("plain/config.json").write_text(json.dumps(config))
    save_file(plain, "plain/model.safetensors", {"format": "pt"})
    made = quantmint("quantize", "plain", "expected", "--scheme", "mxfp4")
    assert made.code == 0, made.err
    equal_to(f"the formula of ModelOpt's {algorithm}", stored(Path("second")), stored(Path("expected")))
    shutil.copytree("source", "older")
    config = json.loads(Path("older/config.json").read_text())
    described = config.pop("quantization_config")
    Path("older/config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": described["quant_algo"], "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    producer = {"name": "modelopt", "version": "0.19.0"}
    Path("older/hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": quantization}))
    assert_imagined(Path("older"))
    made = quantmint("quantize", "older", "of-older", "--scheme", "mxfp4")
    assert made.code == 0, made.err
    assert_equal(stored(Path("of-older")), stored(Path("second")))
    assert not Path("of-older/hf_quant_config.json").exists()  # it describes the source's quantization
    inspected = quantmint("inspect", "of-older", "--source", "older")
    assert inspected.code == 0, inspected.out
    Path("older/hf_quant_config.json").write_text("[]")
    refused = quantmint("quantize", "older", "third", "--scheme", "mxfp4")
    assert refused.code == 2
    assert "hf_quant_config.json: cannot be read" in refused.err
    config = json.loads(Path("source/config.json").read_text())
    assert input_rounding(config) == f"modelopt, {'fp4' if algorithm == 'NVFP4' else 'fp8'}"
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    Path("source/config.json").write_text(json.dumps(config))
    refused = quantmint("quantize", "source", "third", "--scheme", "mxfp4")
    assert refused.code == 2
    assert "modelopt, NVFP4_AWQ" in refused.err


def as_modelopt(folder: Path, out: Path, algorithm: str) -> None:
    """Write a checkpoint of compressed-tensors as ModelOpt writes one."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
    for path in out.glob("*.safetensors"):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            if name.endswith("weight_global_scale"):
                tensors[name.replace("weight_global_scale", "weight_scale_2")] = (1 / tensor.float()).reshape(())
            elif name.endswith("input_global_scale"):
                tensors[name.replace("input_global_scale", "input_scale")] = (1 / tensor.float()).reshape(())
            elif name.endswith("scale") and tensor.numel() == 1:
                tensors[name] = tensor.float().reshape(())
            else:
                tensors[name.replace("weight_packed", "weight")] = tensor
        save_file(tensors, path, {"format": "pt"})


def by_hand(weight: torch.Tensor, scale: torch.Tensor, overall: torch.Tensor | None) -> torch.Tensor:
    if overall is None:
        return (weight.float() * scale).to(torch.bfloat16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    elements = torch.stack([values[(weight & 15).int()], values[(weight >> 4).int()]], dim=-1).flatten(1)
    return (elements * (scale.float() * overall).repeat_interleave(16, 1)).to(torch.bfloat16)


@pytest.mark.slow
def test_kimi_k2_is_built_as_the_deepseek_v3_that_it_is(
    quantmint: Quantmint, models: Models, words: tuple[str, ...]
) -> None:
    """It brings Python code for its own model type, which is not run; any other type of that kind is refused."""
    shutil.copytree(models("deepseek-v3"), "kimi")
    config = json.loads(Path("kimi/config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    Path("kimi/config.json").write_text(json.dumps(config))
    Path("kimi/configuration_deepseek.py").write_text("raise SystemExit('it was run')\n")
    for source, out in ((models("deepseek-v3"), "expected"), ("kimi", "second")):
        made = quantmint("quantize", source, out, "--scheme", "mxfp4", "--algorithm", "gptq", *words)
        assert made.code == 0, made.err
    assert_equal(stored(Path("second")), stored(Path("expected")))
    assert json.loads(Path("second/config.json").read_text())["model_type"] == "kimi_k2"
    config["model_type"] = "unheard-of"
    Path("kimi/config.json").write_text(json.dumps(config))
    refused = quantmint("quantize", "kimi", "third", "--scheme", "mxfp4")
    assert refused.code == 2
    assert "transformers cannot build this model" in refused.err


def test_a_source_whose_tensors_lie_is_refused(quantmint: Quantmint, models: Models) -> None:
    made = quantmint("quantize", models("llama"), "first", "--scheme", "w4a16")
    assert made.code == 0, made.err
    config = json.loads(Path("first/config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    Path("first/config.json").write_text(json.dumps(config))
    refused = quantmint("quantize", "first", "second", "--scheme", "ptpc_fp8")
    assert refused.code == 2
    assert "compressed-tensors, model.layers.0.mlp.down_proj.weight_packed is I32" in refused.err
    assert not Path("second").exists()
