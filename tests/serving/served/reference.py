"""The reference: transformers in float32 with the weights that the stored bytes stand for, inputs and cache rounded.

What a format makes of a number is the product's own arithmetic (`pipeline.quantize.rounding`), which vLLM's
answers are held against here. How a checkpoint becomes a model is not the product's: the source, as transformers loads
it, gets each module's weight by the module's own name, read rightly or wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.pipeline.base.schemes import ActivationFormat
from quantmint.pipeline.base.schemes import scheme as row_of
from quantmint.pipeline.quantize.formats.checkpoint import Reader, open_checkpoint
from quantmint.pipeline.quantize.formats.layout import layout_of, weight_tensors
from quantmint.pipeline.quantize.rounding import kv_cache, round_activations, round_fp8
from quantmint.pipeline.quantize.schemes.registry import dequantize
from quantmint.pipeline.quantize.schemes.scales import FP8_MAX
from tests.serving.served.cases import MODEL
from tests.serving.served.readings import Reading

if TYPE_CHECKING:
    import torch

    from tests.serving.served.answers import Answers


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
        config, scales = self._source.config, {}
        for layer in range(config.num_hidden_layers):
            names = self._layout.kv_scale_names(f"model.layers.{layer}.self_attn")
            scales[layer] = reading.kv_scales(*(float(self._read(name).float().reshape(())) for name in names))
        return kv_cache(config, scales, _cut_fp8 if reading.truncated else round_fp8)


def _rounds(activations: ActivationFormat, parts: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """A hook that rounds a linear layer's input, [..., I], as its scheme says."""

    def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scale = parts["input_scale"].float().reshape(()) if activations.kind == "static" else None
        return (round_activations(inputs[0], activations, scale).to(inputs[0].dtype), *inputs[1:])

    return hook


def _cut_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """FP8 without rounding: of the two values around a number, the one nearer to zero."""
    import torch

    values = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    stored = values.to(torch.float8_e4m3fn)
    # Without its sign, the code below a number is the next towards zero.
    larger = (stored.float().abs() > values.abs()).to(torch.uint8)
    return (stored.view(torch.uint8) - larger).view(torch.float8_e4m3fn).float().mul(scale).to(x.dtype)
