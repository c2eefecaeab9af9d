"""Multi-token predictors by `mtp`, through `quantmint quantize`, and before the classes of vLLM that load them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.encodings import ENCODINGS
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import find_vllm
from tests.zoo.models import add_predictor, build, encode_blocks, read, write

Command = Callable[..., str]
Quantized = Callable[..., Path]

STYLES = {"deepseek_v3": "deepseek", "glm4_moe": "deepseek", "qwen3_next": "qwen", "qwen3_5_moe": "qwen"}
PLACES = {"deepseek": "model.layers.2.", "qwen": "mtp.layers.0."}
KEPT = {"deepseek": ("eh_proj", "shared_head.head", "embed_tokens"), "qwen": ("mlp.shared_expert_gate",)}
CASES = [
    (name, mtp, layout)
    for name in ("deepseek_v3+fp8", "qwen3_next+fp8", "glm4_moe+fp8", "qwen3_5_moe")
    for mtp in ("source", "bf16", "ptpc_fp8", "mxfp4")
    for layout in ("compressed-tensors", "quark")
    if layout != "quark" or (mtp, name) == ("ptpc_fp8", "deepseek_v3+fp8") or name == "qwen3_5_moe"
]


@pytest.fixture(scope="module")
def command(warm_python: Path) -> Command:
    """Return what runs quantmint, requires its exit code, and returns what it wrote."""

    def run_command(*arguments: object, code: int = 0) -> str:
        words = [str(warm_python), "-m", "quantmint", *map(str, arguments)]
        run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert run.returncode == code, run.stderr or run.stdout
        return run.stdout + run.stderr

    return run_command


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models with a predictor, each built once; "+fp8" stores the linear weights in FP8 blocks."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("source") / "model"
            base, _, encoded = name.partition("+")
            if encoded:
                encode_blocks(get(base), folder)
            else:
                build(base, folder)
                add_predictor(folder, STYLES[base], stacked=base == "qwen3_5_moe")
            folders[name] = folder
        return folders[name]

    return get


@pytest.fixture(scope="module")
def quantized(command: Command, source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Checkpoints in MXFP4 by source, `mtp` and layout, each made once by the command, which inspects them."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(name: str, mtp: str, layout: str) -> Path:
        if (name, mtp, layout) not in folders:
            out = tmp_path_factory.mktemp("quantized") / "checkpoint"
            options = ("--scheme", "mxfp4", "--mtp", mtp, "--format", layout, "--device", "cpu")
            assert "inspection  PASS" in command("quantize", source(name), out, *options)
            folders[name, mtp, layout] = out
        return folders[name, mtp, layout]

    return get


def ask_vllm(folders: Sequence[str]) -> dict[str, Any]:
    """Return the answers of `predictor_in_vllm` by folder; skip the test where there is no vLLM."""
    try:
        vllm = find_vllm()
    except UserError as error:
        pytest.skip(error.message)
    words = [str(vllm.python), str(Path(__file__).with_name("predictor_in_vllm.py")), *folders]
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    return {line["folder"]: line for line in map(json.loads, run.stdout.splitlines())}


def predictor(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a predictor's layer by the ends of their names."""
    place = PLACES[STYLES[name.partition("+")[0]]]
    return {key.removeprefix(place): tensor for key, tensor in read(folder).items() if key.startswith(place)}


def decoded(tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return a weight of a source in 16 bit."""
    scale = tensors.get(f"{key}_scale_inv")
    return tensors[key] if scale is None else ENCODINGS["fp8_block"].decode(tensors[key], [scale])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mtp", "layout"), CASES)
def test_the_layers_come_out_as_asked(
    source: Callable[[str], Path], quantized: Quantized, name: str, mtp: str, layout: str
) -> None:
    before, after = predictor(source(name), name), predictor(quantized(name, mtp, layout), name)
    style = STYLES[name.partition("+")[0]]
    for part in KEPT[style]:
        assert torch.equal(after[f"{part}.weight"], before[f"{part}.weight"])
    assert torch.equal(after["mlp.gate.weight"], before["mlp.gate.weight"])
    weights = [f"self_attn.{'q_a_proj' if name.startswith('deepseek') else 'q_proj'}.weight"]
    encoded = "+fp8" in name
    stacked = name == "qwen3_5_moe" and mtp in ("source", "bf16")
    weights += [] if stacked else ["mlp.experts.3.down_proj.weight", "mlp.experts.0.up_proj.weight"]
    assert ("mlp.experts.gate_up_proj" in after) == stacked
    for key in weights:
        packed = "weight_packed" if layout == "compressed-tensors" and mtp == "mxfp4" else "weight"
        stored = after[key.replace("weight", packed)]
        if mtp == "source" and encoded:
            assert torch.equal(stored.view(torch.uint8), before[key].view(torch.uint8))
            assert torch.equal(after[f"{key}_scale"], before[f"{key}_scale_inv"])
        elif mtp in ("source", "bf16"):
            assert torch.equal(stored, decoded(before, key))
        else:
            assert stored.dtype == {"ptpc_fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}[mtp]
            assert f"{key}_scale" in after


def test_what_latent_attention_absorbs_stays_in_16_bit(quantized: Quantized) -> None:
    tensors = predictor(quantized("deepseek_v3+fp8", "mxfp4", "compressed-tensors"), "deepseek_v3")
    assert tensors["self_attn.kv_b_proj.weight"].dtype == torch.bfloat16


def test_a_predictor_is_declared_by_its_prefix(quantized: Quantized) -> None:
    config = json.loads((quantized("deepseek_v3+fp8", "source", "compressed-tensors") / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], [r"re:(.*\.)?layers\.2\.(.*)$"]]
    assert groups["group_1"]["weights"]["block_structure"] == [128, 128]
    config = json.loads((quantized("qwen3_5_moe", "ptpc_fp8", "quark") / "config.json").read_text())
    assert list(config["quantization_config"]["layer_quant_config"]) == ["*mtp[.]*"]


@pytest.mark.slow
def test_gptq_leaves_a_predictor_to_the_nearest(
    command: Command, source: Callable[[str], Path], tmp_path: Path
) -> None:
    calibration = ("--calibration", "tiny", "--samples", 20, "--sequence-length", 32, "--batch-size", 4)
    options = ("--scheme", "mxfp4", "--mtp", "source", "--algorithm", "gptq", "--device", "cpu", *calibration)
    assert "inspection  PASS" in command("quantize", source("glm4_moe+fp8"), tmp_path / "out", *options)
    before, after = predictor(source("glm4_moe+fp8"), "glm4_moe"), predictor(tmp_path / "out", "glm4_moe")
    key = "mlp.experts.0.up_proj.weight"
    assert torch.equal(after[key].view(torch.uint8), before[key].view(torch.uint8))


def test_a_cache_in_quark_keeps_its_scales_beside_a_predictor(
    command: Command, source: Callable[[str], Path], tmp_path: Path
) -> None:
    calibration = ("--calibration", "tiny", "--samples", 20, "--sequence-length", 32, "--batch-size", 4)
    options = ("--scheme", "mxfp4", "--mtp", "ptpc_fp8", "--format", "quark", "--kv-cache", "fp8", *calibration)
    assert "inspection  PASS" in command("quantize", source("glm4_moe"), tmp_path / "out", *options)
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layer_quant_config"]
    assert "*k_proj" not in layers  # it would be the predictor's too, in another scheme


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("glm4_moe", ("--mtp", "fp8"), '--mtp: found "fp8", expected one of source, bf16, ptpc_fp8, mxfp4'),
        ("glm4_moe", ("--mtp", "mxfp4", "--engine", "quark"), "--mtp: found mxfp4 with engine quark"),
        ("llama", ("--mtp", "mxfp4"), "--mtp: found mxfp4 for a model without the layers of a multi-token predictor"),
    ],
)
def test_what_cannot_be_made_is_refused(
    command: Command, source: Callable[[str], Path], tmp_path: Path, name: str, options: tuple[str, ...], said: str
) -> None:
    folder = build("llama", tmp_path / "llama") if name == "llama" else source(name)
    output = command("quantize", folder, tmp_path / "out", "--scheme", "ptpc_fp8", *options, code=2)
    assert said in " ".join(output.split())


@pytest.mark.parametrize("fault", ["scales", "declaration"])
def test_a_predictor_that_is_declared_wrongly_is_found_by_name(
    command: Command, quantized: Quantized, tmp_path: Path, fault: str
) -> None:
    folder = broken(quantized("qwen3_next+fp8", "ptpc_fp8", "compressed-tensors"), tmp_path / "broken", fault)
    output = command("inspect", folder, code=1)
    assert "mtp.layers.0.mlp.experts.0.down_proj.weight" in output
    assert ("missing scale" if fault == "scales" else "undeclared") in output


def broken(folder: Path, out: Path, fault: str) -> Path:
    """Copy a checkpoint without the scales of its predictor, or with the predictor among what is ignored."""
    shutil.copytree(folder, out)
    tensors = read(out)
    if fault == "scales":
        write(out, {k: t for k, t in tensors.items() if not (k.startswith("mtp.") and k.endswith("_scale"))})
    else:
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["ignore"].append(r"re:(.*\.)?mtp\..*")
        (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_loads_all_of_each_predictor(quantized: Quantized, tmp_path: Path) -> None:
    folders = {str(quantized(*case)): case for case in CASES}
    sound = quantized("qwen3_next+fp8", "ptpc_fp8", "compressed-tensors")
    wrong = {fault: broken(sound, tmp_path / fault, fault) for fault in ("scales", "declaration")}
    lines = ask_vllm([*folders, *map(str, wrong.values())])
    for folder, (name, mtp, layout) in folders.items():
        line = lines[folder]
        assert (line["missing"], line["error"]) == ([], None), (name, mtp, layout)
        plain = mtp == "bf16" or (mtp == "source" and "+fp8" not in name)
        kinds = {method for module, method in line["methods"].items() if module.endswith("routed_experts")}
        assert len(line["methods"]) == 0 if plain else len(line["methods"]) >= 5, (name, mtp, layout, line["methods"])
        if not plain:
            assert any(("xfp4" if mtp == "mxfp4" else "Fp8") in kind or "OCP" in kind for kind in kinds), kinds
    assert "model.layers.0.self_attn.qkv_proj.weight_scale" in lines[str(wrong["scales"])]["missing"]
    assert lines[str(wrong["declaration"])]["error"] is not None
