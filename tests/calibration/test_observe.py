from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import Ranges, load_ranges
from quantmint.calibration.replica import load_resident
from tests.measuring import observe

Models = Callable[..., Path]


@pytest.fixture(scope="module")
def llama(models: Models) -> Any:
    return load_resident(models("llama"), "cpu")


def assert_equal(one: Ranges, other: Ranges) -> None:
    for mine, theirs in ((one.inputs, other.inputs), (one.keys, other.keys), (one.values, other.values)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_neither_batch_size_nor_order_changes_a_range(llama: Any, blocks: torch.Tensor, size: int, order: str) -> None:
    shuffled = blocks[torch.randperm(16, generator=torch.Generator().manual_seed(5))]
    chosen = {"forwards": blocks, "backwards": blocks.flip(0), "shuffled": shuffled}[order]
    assert_equal(observe(llama, chosen.split(size)), observe(llama, blocks.split(4)))


def test_keys_are_taken_after_the_rotary_embedding(llama: Any, blocks: torch.Tensor) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inner, batch = llama.model.model, blocks[:4]
    first = inner.layers[0]
    with torch.inference_mode():
        hidden = first.input_layernorm(inner.embed_tokens(batch))
        shape = (*batch.shape, -1, llama.model.config.head_dim)
        keys = first.self_attn.k_proj(hidden).view(shape).transpose(1, 2)
        values = first.self_attn.v_proj(hidden).view(shape).transpose(1, 2)
        cosine, sine = inner.rotary_emb(hidden, torch.arange(batch.shape[1]).unsqueeze(0))
        rotated, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
    ranges = observe(llama, [batch])
    found = ranges.keys["model.layers.0.self_attn"]
    assert torch.equal(found, rotated.abs().amax(dim=(0, 2, 3)).float())
    assert not torch.equal(found, keys.abs().amax(dim=(0, 2, 3)).float()), "the test cannot tell before from after"
    assert torch.equal(ranges.values["model.layers.0.self_attn"], values.abs().amax(dim=(0, 2, 3)).float())
    assert torch.equal(ranges.inputs["model.layers.0.self_attn.q_proj"], hidden.abs().amax().float())


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "gemma3-text", "phi3", "llama4-text"]
)
def test_ranges_are_those_of_the_models_own_cache(models: Models, blocks: torch.Tensor, name: str) -> None:
    """Also where Q, K and V are one projection, and where keys are normalised before they are rotated."""
    from transformers import DynamicCache

    replica, batch = load_resident(models(name), "cpu"), blocks[:4]
    ranges, cache = observe(replica, [batch]), DynamicCache()
    with torch.inference_mode():
        replica.model.base_model(input_ids=batch, past_key_values=cache, use_cache=True)
    assert list(ranges.keys) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for layer, (keys, values) in enumerate(zip(ranges.keys.values(), ranges.values.values(), strict=True)):
        assert torch.equal(keys, cache.layers[layer].keys.abs().amax(dim=(0, 2, 3)).float())
        assert torch.equal(values, cache.layers[layer].values.abs().amax(dim=(0, 2, 3)).float())


def test_inputs_of_all_linear_modules_but_the_head_are_measured(llama: Any, blocks: torch.Tensor) -> None:
    inputs = observe(llama, [blocks[:2]]).inputs
    assert len(inputs) == 14
    assert "lm_head" not in inputs
    assert all(amax.shape == () and amax.dtype == torch.float32 and amax > 0 for amax in inputs.values())
    one = "model.layers.0.self_attn."
    assert inputs[f"{one}q_proj"] == inputs[f"{one}k_proj"] == inputs[f"{one}v_proj"]


def test_the_model_is_left_as_it_was(llama: Any, blocks: torch.Tensor) -> None:
    inner = llama.model.model
    before = {name: value.clone() for name, value in inner.state_dict().items()}
    observe(llama, [blocks[:2]])
    assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())
    assert not any(module._forward_pre_hooks for module in inner.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("harmed", "named"),
    [
        ("mlp.up_proj", r"the input of model\.layers\.0\.mlp\.down_proj"),
        ("self_attn.v_proj", r"the V of model\.layers\.0\.self_attn"),
        ("self_attn.k_proj", r"the K of model\.layers\.0\.self_attn"),
    ],
)
def test_a_value_that_is_not_finite_names_the_first_module_that_met_it(
    models: Models, blocks: torch.Tensor, harmed: str, named: str, bad: float
) -> None:
    replica = load_resident(models("llama"), "cpu")
    with torch.no_grad():
        weight = replica.model.get_submodule(f"model.layers.0.{harmed}").weight
        weight.data = weight.clone()  # not the file
        weight[0, 0] = bad
    with pytest.raises(CalibrationError, match=f"{named} is not finite"):
        observe(replica, [blocks[:1]])
    assert not any(module._forward_pre_hooks for module in replica.model.modules())


def test_a_model_that_caches_nothing_is_refused(models: Models, blocks: torch.Tensor) -> None:
    replica = load_resident(models("llama"), "cpu")
    attention = replica.model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **more: forward(*args, **{**more, "past_key_values": None})
    with pytest.raises(CalibrationError, match=r"model\.layers\.1\.self_attn cached neither K nor V"):
        observe(replica, [blocks[:1]])


def test_pickled_weights_are_not_loaded(models: Models, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models("llama") / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CalibrationError):
        load_resident(tmp_path, "cpu")


def test_ranges_come_back_from_their_file(llama: Any, blocks: torch.Tensor, tmp_path: Path) -> None:
    ranges = observe(llama, blocks.split(4))
    ranges.save(tmp_path / "one.safetensors")
    ranges.save(tmp_path / "two.safetensors")
    assert_equal(load_ranges(tmp_path / "one.safetensors"), ranges)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_a_file_that_holds_no_ranges_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CalibrationError, match=r"'model\.norm\.weight' is not a range"):
        load_ranges(tmp_path / "a.safetensors")


def test_damaged_files_are_named(models: Models, blocks: torch.Tensor, tmp_path: Path) -> None:
    ranges, progress = tmp_path / "ranges.safetensors", tmp_path / "progress.pt"
    ranges.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not JSON at all!")
    with pytest.raises(CalibrationError, match=r"ranges\.safetensors: the ranges cannot be read"):
        load_ranges(ranges)
    Measurement(Observation()).save(progress)
    progress.write_bytes(progress.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=r"progress\.pt: the measurement cannot be read.*remove the file"):
        Measurement.load(Observation(), progress)
    torch.save({}, progress)
    with pytest.raises(CalibrationError, match=r"progress\.pt: the measurement cannot be read"):
        Measurement.load(Observation(), progress)
