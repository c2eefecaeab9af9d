"""The calibration forward: run batches through the 16-bit model and keep the largest magnitudes.

K and V are taken where the model hands them to its cache, after the rotary embedding: a cache that records and stores
nothing needs no knowledge of any architecture. Attention is computed step by step ("eager"), which is what
llm-compressor calibrates with; fused attention differs in the last bit of bfloat16 from the second layer on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.errors import CalibrationError
from calibration.ranges import Ranges

if TYPE_CHECKING:
    import torch


def load_resident(folder: Path, device: str, *, trust_remote_code: bool = False) -> Any:
    """Load the whole 16-bit model of a local folder onto one device, safetensors only."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CalibrationError(f"{folder}: the model cannot be loaded: {error}") from error
    return model.to(device).eval()


def observe(model: Any, batches: Iterable[torch.Tensor], *, advance: Callable[[int], None] = lambda _: None) -> Ranges:
    """Measure a model that is resident on its device.

    Args:
        model: a causal language model of transformers.
        batches: int64 token ids of [batch, sequence]; no padding.
        advance: told the number of samples after each batch.

    Raises:
        CalibrationError: an observed value is not finite, or an attention layer cached nothing.
    """
    import torch

    inputs: dict[str, torch.Tensor] = {}
    cached: dict[int, list[torch.Tensor]] = {}
    attention = _attention_by_layer(model)
    device = next(model.parameters()).device
    handles = [
        module.register_forward_pre_hook(_input_hook(inputs, name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    ]
    try:
        with torch.inference_mode():
            for batch in batches:
                # Only what is cached and what enters the linear modules matters: the output head's product, the
                # largest tensor of the forward, is left out.
                model.base_model(input_ids=batch.to(device), past_key_values=_recording_cache(cached), use_cache=True)
                advance(batch.shape[0])
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for layer, name in attention.items() if layer not in cached]
    if silent:
        raise CalibrationError(f"{silent[0]} cached neither K nor V: its ranges cannot be measured this way")
    found = Ranges(
        inputs={name: amax.cpu() for name, amax in inputs.items()},
        keys={attention[layer]: pair[0].cpu() for layer, pair in sorted(cached.items())},
        values={attention[layer]: pair[1].cpu() for layer, pair in sorted(cached.items())},
    )
    _require_finite(found)
    return found


def _attention_by_layer(model: Any) -> dict[int, str]:
    return {
        module.layer_idx: name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    }


def _input_hook(inputs: dict[str, torch.Tensor], name: str) -> Callable[[Any, tuple[Any, ...]], None]:
    def hook(_module: Any, args: tuple[Any, ...]) -> None:
        import torch

        amax = args[0].detach().abs().amax().float()
        inputs[name] = amax if name not in inputs else torch.maximum(inputs[name], amax)

    return hook


def _recording_cache(cached: dict[int, list[torch.Tensor]]) -> Any:
    import torch
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """Keeps the largest magnitude a head, and none of the tensors."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # [batch, H_kv, sequence, head_dim] -> [H_kv]
            fresh = [states.abs().amax(dim=(0, 2, 3)).float() for states in (key_states, value_states)]
            known = cached.get(layer_idx)
            cached[layer_idx] = fresh if known is None else [*map(torch.maximum, known, fresh)]
            return key_states, value_states

    return RecordingCache()


def _require_finite(ranges: Ranges) -> None:
    for kind, table in (("input", ranges.inputs), ("K", ranges.keys), ("V", ranges.values)):
        for name, amax in table.items():
            if not bool(amax.isfinite().all()):
                raise CalibrationError(f"the {kind} of {name} is not finite on the calibration data: {amax.tolist()}")
