"""A cache that records what it is handed and stores nothing.

K and V are taken where the model hands them to its cache, after the rotary embedding, which needs no knowledge of any
architecture. Multi-head latent attention hands over its latent and the rotated part that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calibration.measurement import Measurement

if TYPE_CHECKING:
    import torch


def recording_cache(measurement: Measurement, attention: Mapping[int, str]) -> Any:
    """An empty cache of transformers; ``attention`` names the attention module of each layer."""
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """Hands back what it is given."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            measurement.cached(attention[layer_idx], key_states, value_states)
            return key_states, value_states

    return RecordingCache()


def attention_by_layer(model: Any) -> dict[int, str]:
    """The attention modules of a model's language part, by the number of their layer."""
    decoder = model.get_decoder()
    inside = next(name for name, module in model.named_modules() if module is decoder)
    found = {
        module.layer_idx: name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and type(module).__name__.endswith("Attention")
        and (not inside or name.startswith(f"{inside}."))
    }
    return dict(sorted(found.items()))
