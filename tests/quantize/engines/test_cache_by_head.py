"""KV scales by head, from calibration to what an inspection says of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.calibration.replica import load_resident
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, scale_ranges, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import layout
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.schemes.scales import fp8_scale
from tests.measuring import observe


@pytest.mark.parametrize("model", ["llama", "gemma3", "phi3"])
def test_a_checkpoint_with_a_scale_for_each_head(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path, model: str
) -> None:
    ranges = observe(load_resident(models(model), "cpu"), blocks.split(4))
    source = open_checkpoint(models(model))
    structure = read_structure(source.folder, source.tensors)
    choice = Choice(dict.fromkeys(structure.linear, "ptpc_fp8"), structure.kept, True, True)
    static = scale_ranges(ranges, choice, "compressed-tensors")
    plans = plan_shards(source, structure, choice, "compressed-tensors")
    out = tmp_path / "checkpoint"
    write_checkpoint(
        CheckpointPlan(source, plans, choice, static, checkpoint_format="compressed-tensors"),
        out,
        manifest=tmp_path / "manifest",
    )
    made = open_checkpoint(out)
    stored = {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}
    for attention in structure.attention:
        for name, amax in (("k_scale", ranges.keys[attention]), ("v_scale", ranges.values[attention])):
            scale = stored[f"{attention}.{name}"]
            assert scale.shape == (2, 1, 1)
            assert torch.equal(scale.flatten(), fp8_scale(amax.bfloat16()))
    assert made.config["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    wanted = {name: tuple(fp8_scale(amax.bfloat16()).tolist()) for name, amax in static.items()}
    assert inspect_checkpoint(made, structure, source=source, expected=Expectations(wanted)).findings == ()
    different = [name for name in structure.attention if len(stored[f"{name}.v_scale"].unique()) == 2]
    assert different, "heads must differ to be told apart"
    swapped = different[0]
    stored[f"{swapped}.v_scale"] = stored[f"{swapped}.v_scale"].flip(0)
    (path,) = out.glob("*.safetensors")
    save_file(stored, path, metadata={"format": "pt"})
    findings = inspect_checkpoint(
        open_checkpoint(out), structure, source=source, expected=Expectations(wanted)
    ).findings
    assert {(finding.rule, finding.where) for finding in findings} == {("wrong scale", f"{swapped}.v_scale")}


def test_one_scale_a_layer_is_the_largest_of_its_heads(models: Callable[..., Path], blocks: torch.Tensor) -> None:
    ranges = observe(load_resident(models("llama"), "cpu"), blocks.split(4))
    choice = Choice({}, (), True, True)
    for checkpoint_format in ("compressed-tensors", "quark"):
        one = scale_ranges(ranges, replace(choice, kv_per_head=False), checkpoint_format)
        k_scale, _ = layout(checkpoint_format).kv_scale_names("model.layers.0.self_attn")
        assert one[k_scale].tolist() == [float(ranges.keys["model.layers.0.self_attn"].max())]


def test_quark_has_none() -> None:
    with pytest.raises(UserError, match="the format quark has no KV scales by head"):
        layout("quark").kv_scale_shape(2)
    assert layout("compressed-tensors").kv_scale_shape(2) == (2, 1, 1)
