"""The reference: transformers in float32 with the weights that the stored bytes stand for, inputs and cache rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines.stream.kernels import FP8_MAX, MX_GROUP, mxfp4
from pipeline.formats.checkpoint import open_checkpoint
from pipeline.formats.layout import layout_of
from pipeline.formats.tensors import weight_tensors
from pipeline.inspection.dequantize import dequantize
from pipeline.inspection.numbers import Reader
from pipeline.schemes import ActivationFormat
from pipeline.schemes import scheme as row_of
from tests.served.cases import MODEL
from tests.served.readings import Reading

if TYPE_CHECKING:
    import torch

    from tests.served.answers import Answers

_INT8_MAX = 127.0


class Reference:
    """A checkpoint, ready to be read in any way."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        checkpoint = open_checkpoint(folder)
        self._read, self._layout = Reader(checkpoint), layout_of(checkpoint.config)
        self._source = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        shapes = {
            name: (module.out_features, module.in_features)
            for name, module in self._source.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        }
        claims = self._layout.claims(checkpoint.config["quantization_config"], list(shapes))
        self._schemes = {name: scheme for name, scheme in claims.schemes.items() if scheme is not None}
        self._kv_cache = claims.kv_cache
        assert set(self._schemes) == set(shapes), "a module of the embedded model is not quantized"
        self._parts = {
            name: {
                stored.role: self._read(stored.name)
                for stored in weight_tensors(self._layout.name, scheme, name, shapes[name], "BF16")
            }
            for name, scheme in self._schemes.items()
        }

    def logprobs(self, answers: Answers, reading: Reading, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What the checkpoint, so read, says where a server was asked: float64 [N], in ``dtype``, else float32."""
        import torch

        model = copy.deepcopy(self._source)
        parts = reading.change(self._parts)
        for name, scheme in self._schemes.items():
            module = model.get_submodule(name)
            if reading.quantized:
                module.weight.data = dequantize(scheme, parts[name])
            if reading.activations and (reading.mx_activations or not row_of(scheme).is_mx):
                module.register_forward_pre_hook(_rounds(row_of(scheme).activations, parts[name]))
        model = model.to(dtype or torch.float32)
        cache = self._rounding_cache(reading) if reading.cache and self._kv_cache else None
        with torch.no_grad():
            logits = model(answers.ids, past_key_values=cache, use_cache=cache is not None).logits
        found = logits.float().log_softmax(-1)
        prompt, place, token = answers.rows.unbind(1)
        return found[prompt, place, token].double()

    def _rounding_cache(self, reading: Reading) -> Any:
        from transformers.cache_utils import DynamicCache

        layout, read = self._layout, self._read

        class RoundingCache(DynamicCache):
            """K after RoPE, and V, through FP8 with their layer's scales."""

            def update(self, key: Any, value: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
                names = layout.kv_scale_names(f"model.layers.{layer_idx}.self_attn")
                scales = reading.kv_scales(*(float(read(name).float().reshape(())) for name in names))
                key, value = (
                    _fp8(x, scale, truncated=reading.truncated) for x, scale in zip((key, value), scales, strict=True)
                )
                return super().update(key, value, layer_idx, *rest, **named)

        return RoundingCache()


def _rounds(activations: ActivationFormat, parts: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """A hook that rounds a linear layer's input, [..., I], as its scheme says."""

    def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_rounded(inputs[0].float(), activations, parts).to(inputs[0].dtype), *inputs[1:])

    return hook


def _rounded(x: torch.Tensor, activations: ActivationFormat, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    import torch

    if activations.kind == "none":
        return x
    if activations.dtype == "e2m1":
        made = mxfp4(x.reshape(-1, x.shape[-1]))
        return dequantize("mxfp4", made).reshape(x.shape)
    if activations.kind == "static":
        return _fp8(x, float(parts["input_scale"].float().reshape(())))
    grouped = x.unflatten(-1, (-1, activations.group)) if activations.group else x
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    if activations.dtype == "int8":
        scale = largest / _INT8_MAX
        return (grouped / scale).round().clamp(-_INT8_MAX, _INT8_MAX).mul(scale).reshape(x.shape)
    assert activations.dtype == "e4m3"
    assert activations.group != MX_GROUP, "MX scales are powers of two"
    scale = largest / FP8_MAX
    return (grouped / scale).to(torch.float8_e4m3fn).float().mul(scale).reshape(x.shape)


def _fp8(x: torch.Tensor, scale: float, *, truncated: bool = False) -> torch.Tensor:
    import torch

    values = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    stored = values.to(torch.float8_e4m3fn)
    if truncated:  # without its sign, the code below a number is the next towards zero
        larger = (stored.float().abs() > values.abs()).to(torch.uint8)
        stored = (stored.view(torch.uint8) - larger).view(torch.float8_e4m3fn)
    return stored.float().mul(scale).to(x.dtype)
