"""What the engine reads: stacked experts, FP8 in blocks, wider floats, and weights that no one should quantize."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil, log10
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.calibration.decoders import decode_blocks
from quantmint.calibration.encodings import Encoded
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.quantize.engines.stream import schedule
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, Written, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.inspection.numbers import compare
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.registry import KERNELS, dequantize, kernel_name

SCHEMES = ["ptpc_fp8", "fp8", "fp8_block", "mxfp4"]
EXPERTS, HIDDEN, INNER = 3, 192, 160


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def structure(weights: Mapping[str, WeightSource], encoded: Mapping[str, Encoded] | None = None) -> Structure:
    return Structure(dict.fromkeys(weights, (0, 0)), (), (), 0, weights, encoded or {})


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def quantize(folder: Path, parts: Structure, schemes: Mapping[str, str], out: Path, **options: bool) -> Written:
    source = open_checkpoint(folder)
    choice = Choice(schemes, (), False)
    static = {f"{module}.input_scale": 1.0 for module, scheme in schemes.items() if scheme == "fp8"}
    return write_checkpoint(
        CheckpointPlan(
            source,
            plan_shards(source, parts, choice, "compressed-tensors", **options),
            choice,
            static,
            checkpoint_format="compressed-tensors",
        ),
        out,
        manifest=out.with_suffix(".jsonl"),
    )


def assert_made_of(found: Mapping[str, torch.Tensor], module: str, scheme: str, weight: torch.Tensor) -> None:
    kernel = KERNELS[kernel_name(scheme, "compressed-tensors")]
    for role, expected in kernel.compute(weight.contiguous(), None).items():
        stored = found[f"{module}.{role}"]
        assert torch.equal(stored.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), role


@pytest.mark.parametrize("piece", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacked_experts_come_out_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, transposed: bool, piece: int
) -> None:
    monkeypatch.setattr(schedule, "CPU_PIECE", piece)
    gate_up, down = numbers(EXPERTS, 2 * INNER, HIDDEN), numbers(EXPERTS, HIDDEN, INNER, seed=1)
    stored = {"e.gate_up_proj": gate_up, "e.down_proj": down, "router.weight": numbers(EXPERTS, HIDDEN)}
    if transposed:
        stored |= {name: stored[name].transpose(1, 2).contiguous() for name in ("e.gate_up_proj", "e.down_proj")}
    weights, expected = {}, {}
    for expert in range(EXPERTS):
        rows = {"gate_proj": (0, INNER), "up_proj": (INNER, 2 * INNER)}
        for name, (first, last) in rows.items():
            weights[f"e.{expert}.{name}"] = WeightSource("e.gate_up_proj", expert, (first, last), transposed)
            expected[f"e.{expert}.{name}"] = gate_up[expert, first:last]
        weights[f"e.{expert}.down_proj"] = WeightSource("e.down_proj", expert, None, transposed)
        expected[f"e.{expert}.down_proj"] = down[expert]
    folder = save(tmp_path / "source", stored)
    quantize(folder, structure(weights), dict.fromkeys(weights, scheme), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name.rpartition(".")[0] for name in found} == {*weights, "router"}
    assert torch.equal(found["router.weight"], stored["router.weight"])
    for module, weight in expected.items():
        assert_made_of(found, module, scheme, weight)


def test_a_stack_of_which_nothing_is_quantized_stays_a_stack(tmp_path: Path) -> None:
    down, other = numbers(2, HIDDEN, INNER), numbers(64, 64)
    weights = {f"e.{expert}.down_proj": WeightSource("e.down_proj", expert) for expert in range(2)}
    weights["o_proj"] = WeightSource("o_proj.weight")
    folder = save(tmp_path / "source", {"e.down_proj": down, "o_proj.weight": other})
    quantize(folder, structure(weights), {"o_proj": "ptpc_fp8"}, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["e.down_proj"], down)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_in_blocks_is_decoded_to_bfloat16_and_then_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(schedule, "CPU_PIECE", 30_000)
    stored = numbers(300, 416).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)) * 0.01
    wide = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :416]
    decoded = (stored.float() * wide).bfloat16()
    names = ("o_proj", "kept")
    tensors = {f"{name}.weight": stored.clone() for name in names}
    tensors |= {f"{name}.weight_scale_inv": scale.clone() for name in names}
    weights = {
        name: WeightSource(f"{name}.weight", encoded=Encoded("fp8_block", (f"{name}.weight_scale_inv",)))
        for name in names
    }
    parts = structure(
        weights, {f"{name}.weight": Encoded("fp8_block", (f"{name}.weight_scale_inv",)) for name in names}
    )
    quantize(save(tmp_path / "source", tensors), parts, {"o_proj": scheme}, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("scale_inv" in name for name in found)
    assert torch.equal(found["kept.weight"], decoded)
    if scheme == "fp8_block":  # which the source has already
        assert torch.equal(found["o_proj.weight"].view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(found["o_proj.weight_scale"], scale)
    else:
        assert_made_of(found, "o_proj", scheme, decoded)


@pytest.mark.parametrize("power", [-140, -126, -12, 100, 118, 126])
@pytest.mark.parametrize("shape", [(128, 256), (5, 130), (300, 416), (256, 0), (0, 128)])
@pytest.mark.parametrize("nan", [False, True])
def test_blocks_decode_to_the_product_in_float32_rounded_once(shape: tuple[int, int], power: int, nan: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes = codes if nan else codes.masked_fill(codes & 0x7F == 0x7F, 0)
    scale = torch.randn(ceil(shape[0] / 128), ceil(shape[1] / 128), generator=generator) * 2.0**power
    weight = codes.view(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    expected, found = (weight.float() * wide).bfloat16(), decode_blocks(weight, scale)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(*(each.nan_to_num(nan=0).view(torch.int16) for each in (found, expected)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_floats_are_quantized_in_their_own_precision(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    weight = numbers(130, 256, dtype=dtype)
    folder = save(tmp_path / "source", {"o_proj.weight": weight})
    quantize(folder, structure({"o_proj": WeightSource("o_proj.weight")}), {"o_proj": scheme}, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_made_of(found, "o_proj", scheme, weight)
    if scheme != "mxfp4":
        assert found["o_proj.weight_scale"].dtype == dtype


def test_weights_that_are_run_as_one_share_a_scale_also_across_files(tmp_path: Path) -> None:
    tensors = {f"a.{name}.weight": (number + 1) * numbers(64, 64, seed=number) for number, name in enumerate("qkvo")}
    tensors = {name.replace(".", ".", 1).replace(".weight", "_proj.weight"): t for name, t in tensors.items()}
    folder = tmp_path / "source"
    folder.mkdir()
    index = {}
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, folder / f"model-{number}.safetensors")
        index[name] = f"model-{number}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text("{}")
    modules = [name.removesuffix(".weight") for name in tensors]
    weights = structure({module: WeightSource(f"{module}.weight") for module in modules})
    for shared in (True, False):
        out = tmp_path / f"out-{shared}"
        quantize(folder, weights, dict.fromkeys(modules, "fp8"), out, shared_scales=shared)
        made = {name: t for shard in out.glob("*.safetensors") for name, t in load_file(shard).items()}
        scales = {module: float(made[f"{module}.weight_scale"]) for module in modules}
        fused = {scales[f"a.{name}_proj"] for name in "qkv"}
        assert len(fused) == (1 if shared else 3)
        assert max(fused) == scales["a.v_proj"] != scales["a.o_proj"]
        for module in modules:
            restored = dequantize(
                "fp8", {"weight": made[f"{module}.weight"], "weight_scale": made[f"{module}.weight_scale"]}
            )
            assert compare(tensors[f"{module}.weight"], restored).sqnr_db > 28


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", [*SCHEMES, None])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_committed(
    tmp_path: Path, scheme: str | None, bad: float
) -> None:
    weight = numbers(256, 256)
    weight[200, 17] = bad
    folder = save(tmp_path / "source", {"a.o_proj.weight": numbers(256, 256), "b.o_proj.weight": weight})
    parts = structure({f"{name}.o_proj": WeightSource(f"{name}.o_proj.weight") for name in "ab"})
    schemes = {"a.o_proj": scheme or "ptpc_fp8"} | ({"b.o_proj": scheme} if scheme else {})
    with pytest.raises(StageError, match=r"model\.safetensors: b\.o_proj\.weight holds numbers that are not finite"):
        quantize(folder, parts, schemes, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_largest_number_of_bfloat16_is_finite(tmp_path: Path, scheme: str) -> None:
    weight = numbers(256, 256)
    weight[200, 17] = torch.finfo(torch.bfloat16).max
    folder = save(tmp_path / "source", {"o_proj.weight": weight})
    quantize(folder, structure({"o_proj": WeightSource("o_proj.weight")}), {"o_proj": scheme}, tmp_path / "out")
    assert_made_of(load_file(tmp_path / "out" / "model.safetensors"), "o_proj", scheme, weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_that_is_taken_on_the_way_is_that_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    weight = numbers(512, 512)
    folder = save(tmp_path / "source", {"o_proj.weight": weight})
    parts = structure({"o_proj": WeightSource("o_proj.weight")})
    errors = []
    for piece in (1 << 30, 128 * 512 * 2):
        monkeypatch.setattr(schedule, "CPU_PIECE", piece)
        out = tmp_path / f"out-{piece}"
        errors.append(quantize(folder, parts, {"o_proj": scheme}, out).errors["o_proj"])
    found = load_file(out / "model.safetensors")
    stored = {
        role: found[f"o_proj.{role}"]
        for role in ("weight", "weight_packed", "weight_scale")
        if f"o_proj.{role}" in found
    }
    restored = dequantize(scheme, stored)
    for error in errors:
        assert error.count == 512 * 512 / 64
        assert error.sqnr_db == pytest.approx(compare(weight[::64], restored[::64]).sqnr_db, abs=1e-4)
        assert error.sqnr_db == pytest.approx(10 * log10(error.signal / error.noise))
