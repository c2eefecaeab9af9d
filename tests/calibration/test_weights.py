from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.replica import load_resident, replica
from quantmint.calibration.weights import Shards, held

Models = Callable[..., Path]
NAMES = ["llama", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3", "llama4-text", "gpt-oss"]


@pytest.fixture
def copy(models: Models, tmp_path: Path) -> Callable[..., Path]:
    """A model whose tensors may be changed."""

    def make(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(models(name), folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_buffers_are_those_that_transformers_loads(models: Models, name: str, sharded: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = models(name, sharded=sharded)
    ours, theirs = load_resident(folder, "cpu"), AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    wanted = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    found = {**dict(ours.model.named_parameters()), **dict(ours.model.named_buffers())}
    assert found.pop("lm_head.weight").is_meta, "the head's product is never computed"
    assert found.keys() == wanted.keys() - {"lm_head.weight"}
    for key, value in found.items():
        assert value.dtype == wanted[key].dtype, key
        assert torch.equal(value, wanted[key]), key
    assert not ours.model.training


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gemma3-text"])
def test_a_part_is_loaded_and_freed_alone(models: Models, name: str) -> None:
    one = replica(models(name), "cpu")
    whole = load_resident(models(name), "cpu")
    part = held(one.model, "model.layers.1")
    for _ in range(2):
        one.weights.load(part)
        there = {key for key, value in one.model.named_parameters() if not value.is_meta}
        assert there == {key for key in part if key in dict(one.model.named_parameters())}
        for key in part:
            assert torch.equal(one.model.get_parameter_or_buffer(key), whole.model.get_parameter_or_buffer(key))
        one.weights.free(part)
        assert all(value.is_meta for value in one.model.parameters())


def test_nothing_is_read_before_it_is_wanted(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(Shards, "read", lambda _self, name, _device: read.append(name) or torch.zeros(1))
    one = replica(models("mixtral"), "cpu")
    assert read == []
    with pytest.raises(CalibrationError):  # zeros have another shape
        one.weights.load(held(one.model, "model.layers.1.self_attn"))
    assert sorted(read) == [f"model.layers.1.self_attn.{part}_proj.weight" for part in "koqv"]


def test_a_tied_embedding_may_be_stored_as_the_head(copy: Callable[..., Path]) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = copy("qwen3", rename)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_resident(folder, "cpu").model.model.embed_tokens.weight, stored)


def test_a_weight_that_is_missing(copy: Callable[..., Path]) -> None:
    folder = copy("llama", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CalibrationError, match=r"model\.norm\.weight is not in the checkpoint"):
        load_resident(folder, "cpu")


def test_a_weight_of_another_shape(copy: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = copy("llama", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CalibrationError, match=r"up_proj\.weight is \[255, 128\], expected \[256, 128\]"):
        load_resident(folder, "cpu")


def test_an_expert_of_another_shape_or_none_at_all(copy: Callable[..., Path]) -> None:
    """Experts go straight to their place in the stack; those of a stack that is not whole are left to transformers."""
    stored = load_file(copy("mixtral", lambda _: None) / "model.safetensors")
    name = next(name for name in stored if ".experts.1." in name)
    folder = copy("mixtral", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CalibrationError, match=rf"{re.escape(name)} is \[\d+, \d+\], expected \[\d+, \d+\]"):
        load_resident(folder, "cpu")
    with pytest.raises(CalibrationError):
        load_resident(copy("mixtral", lambda tensors: tensors.pop(name)), "cpu")


def test_fp8_in_blocks_is_decoded(copy: Callable[..., Path]) -> None:
    """As DeepSeek publishes it: a scale for each block of 128 x 128, smaller ones at the edges."""
    expected: dict[str, torch.Tensor] = {}

    def encode(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            rows, columns = weight.shape
            scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            decoded = tensors[name].float()
            for row in range(rows):
                for block in range(scale.shape[1]):
                    decoded[row, 128 * block : 128 * block + 128] *= scale[row // 128, block]
            expected[name] = decoded.bfloat16()

    folder = copy("qwen2", encode)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_resident(folder, "cpu").model
    assert expected
    for name, weight in expected.items():
        assert torch.equal(model.get_parameter(name), weight), name


def test_weights_that_are_quantized_otherwise(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match=r"quantized already \(gptq, gptq of 3 bits\), expected 16 bit"):
        load_resident(folder, "cpu")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("named", [True, False])
def test_the_dtype_is_the_configurations_else_the_files(
    models: Models, tmp_path: Path, dtype: str, named: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("llama", dtype=dtype), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"} if named else config))
    found = {str(value.dtype) for value in load_resident(folder, "cpu").model.model.parameters()}
    assert found == {"torch.float16" if named else f"torch.{dtype}"}
