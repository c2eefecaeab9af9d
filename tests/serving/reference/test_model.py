"""From files to a model: every architecture, layout and scheme, against transformers and simple arithmetic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.model.experts import stacks_experts
from quantmint.pipeline.quantize.rounding import kv_cache
from quantmint.pipeline.serving.reference.model import load
from tests.serving.served.answers import Answers
from tests.serving.served.cases import Case, make_case
from tests.serving.served.readings import AS_MEANT
from tests.serving.served.reference import Reference

IDS = torch.arange(4, 60).reshape(2, 28)
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3", "llama4-text", "gemma3",
    "llama4", "qwen3-vl-moe", "qwen2-moe",
)  # fmt: skip
STREAMED = (
    ("ptpc_fp8", "compressed-tensors"), ("fp8", "quark"), ("fp8_block", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"), ("mxfp4_fp8", "quark"),
)  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_16_bit_model_is_the_one_that_transformers_loads(models: Any, name: str) -> None:
    loaded = load(models(name, sharded=True), "cpu")
    theirs = type(loaded.model).from_pretrained(models(name), dtype=torch.float32).eval()
    # Theirs multiply the experts of a mixture in another order.
    assert torch.allclose(logits(loaded.model), logits(theirs), atol=1e-5)
    assert loaded.runtime.endswith("in float32, 16-bit weights")
    assert loaded.kv_cache_dtype == "auto"


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "layout"), STREAMED)
def test_a_checkpoint_answers_as_the_independent_reference(tmp_path: Path, scheme: str, layout: str) -> None:
    folder = make_case(Case(scheme, layout, "fp8"), tmp_path / "made", device="cpu")
    rows = torch.tensor([(p, place, token) for p in range(2) for place in range(28) for token in (5, 77, 300)])
    expected = Reference(folder).logprobs(Answers(IDS, rows, torch.zeros(len(rows))), AS_MEANT)
    loaded = load(folder, "cpu")
    with torch.inference_mode():
        said = loaded.model(
            input_ids=IDS, past_key_values=kv_cache(loaded.model.config, loaded.kv_scales), use_cache=True
        ).logits.log_softmax(-1)
    prompt, place, token = rows.unbind(1)
    # Float32 in another order may push a number over the edge of a rounding, rarely.
    assert (said[prompt, place, token] - expected).abs().median() < 1e-4
    assert loaded.kv_cache_dtype == "fp8"
    assert "FP8 KV cache" in loaded.runtime


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "llama4-text", "qwen3-vl-moe", "deepseek-v3"])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4_fp8"])
def test_each_expert_of_a_stack_gets_its_own_weights_and_rounded_inputs(
    models: Any, quantize: Any, name: str, scheme: str
) -> None:
    made = quantize(name, "quark", scheme=scheme, kv_cache=False)
    loaded, source = load(made.folder, "cpu"), load(models(name), "cpu")
    stacks = {
        key: m for key, m in loaded.model.named_modules() if any(p.ndim == 3 for p in m.parameters(recurse=False))
    }
    assert stacks
    for key, experts in stacks.items():
        theirs = source.model.get_submodule(key)
        for parameter, stack in experts.named_parameters(recurse=False):
            original = getattr(theirs, parameter)
            for expert in range(stack.shape[0]):
                noise = (stack[expert] - original[expert]).norm() / original[expert].norm()
                others = (stack[expert] - original[(expert + 1) % stack.shape[0]]).norm() / original[expert].norm()
                assert 0 < noise < 0.2 < others, f"{key}.{parameter}[{expert}]"
    assert not torch.equal(logits(loaded.model), logits(_without_hooks(loaded.model)))


def test_the_input_of_a_stack_is_rounded_by_token(models: Any, quantize: Any) -> None:
    experts = load(quantize("mixtral", "compressed-tensors", kv_cache=False).folder, "cpu").model
    experts = next(module for module in experts.modules() if stacks_experts(module))
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[0, 3]] * 7), torch.tensor([[0.25, 0.75]] * 7)
    with torch.inference_mode():
        found = experts(hidden, index, weights)
        expected = torch.zeros_like(hidden)
        for expert, share in ((0, 0.25), (3, 0.75)):
            gate, up = (_by_token(hidden) @ experts.gate_up_proj[expert].t()).chunk(2, -1)
            expected += share * (_by_token(torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].t())
    assert torch.allclose(found, expected, atol=1e-5)
    with torch.inference_mode():
        assert not torch.allclose(_without_hooks(experts)(hidden, index, weights), expected, atol=1e-4)


def test_scales_by_head_round_each_head(models: Any, quantize: Any, tmp_path: Path) -> None:
    broken = _copy(quantize("llama", "compressed-tensors").folder, tmp_path)
    broken.config["quantization_config"]["kv_cache_scheme"]["strategy"] = "attn_head"
    for name in [name for name in broken.tensors if name.endswith(("k_scale", "v_scale"))]:
        broken.tensors[name] = torch.tensor([0.01, 0.02]).reshape(2, 1, 1)
    loaded = load(broken.save(), "cpu")
    assert [tuple(scale.shape) for pair in loaded.kv_scales.values() for scale in pair] == [(2, 1, 1)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8_w8a8", "fp8_block", "mxfp4"])
def test_what_a_library_wrote_is_loaded(by_llmcompressor: Callable[[str], Path], models: Any, name: str) -> None:
    loaded, source = load(by_llmcompressor(name), "cpu"), load(models("llama"), "cpu")
    assert 0 < (logits(loaded.model) - logits(source.model)).norm() / logits(source.model).norm() < 0.5


def test_what_cannot_be_represented_is_refused(quantize: Any, tmp_path: Path) -> None:
    sound = quantize("llama", "compressed-tensors").folder
    rotated = _copy(sound, tmp_path / "rotated")
    rotated.config["quantization_config"]["transform_config"] = {"config_groups": {"R3": {"type": "hadamard"}}}
    with pytest.raises(UserError, match="cannot represent this checkpoint: its transform_config rotates"):
        load(rotated.save(), "cpu")
    strange = _copy(sound, tmp_path / "strange")
    strange.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    with pytest.raises(UserError, match="does not know the scheme of") as refused:
        load(strange.save(), "cpu")
    assert refused.value.hint == "Use evaluation.runtime: vllm."
    incomplete = _copy(sound, tmp_path / "incomplete")
    del incomplete.tensors["model.layers.1.mlp.up_proj.weight_scale"]
    with pytest.raises(UserError, match=r"tensors contradict its configuration: model\.layers\.1\.mlp\.up_proj"):
        load(incomplete.save(), "cpu")
    foreign = _copy(sound, tmp_path / "foreign")
    foreign.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UserError, match="unknown checkpoint format 'gptq'"):
        load(foreign.save(), "cpu")


def test_an_fp8_cache_of_latents_is_refused(quantize: Any, tmp_path: Path) -> None:
    latent = _copy(quantize("deepseek-v3", "compressed-tensors", kv_cache=False).folder, tmp_path)
    latent.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    with pytest.raises(UserError, match=r"FP8 cache for latent attention \(kv_lora_rank \d+\)"):
        load(latent.save(), "cpu")


class _Copy:
    def __init__(self, original: Path, folder: Path) -> None:
        shutil.copytree(original, folder, dirs_exist_ok=True)
        self._folder = folder
        self.tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def save(self) -> Path:
        save_file(self.tensors, self._folder / "model.safetensors", metadata={"format": "pt"})
        (self._folder / "config.json").write_text(json.dumps(self.config))
        return self._folder


def _copy(original: Path, folder: Path) -> _Copy:
    return _Copy(original, folder)


def _without_hooks(module: Any) -> Any:
    for part in module.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    return module


def _by_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def test_the_target_s_rounding_of_mx_scales_reaches_every_input(quantize: Any) -> None:
    """Rounded up, no input of a layer is cut; the runtime says so, and what it says of texts changes."""
    folder = quantize("llama", "quark", scheme="mxfp4", kv_cache=False).folder
    even, up = (load(folder, "cpu", mx_scales=mode) for mode in ("even", "up"))
    assert "MX scales rounded up" in up.runtime
    assert "MX scales" not in even.runtime
    ids = torch.arange(4, 60)[None]
    with torch.no_grad():
        assert not torch.equal(even.model(ids).logits, up.model(ids).logits)
