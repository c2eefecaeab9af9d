"""A KV cache that holds what an FP8 cache holds: K after the rotary embedding and V, through e4m3 with their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.reference.rounding import round_fp8

if TYPE_CHECKING:
    import torch

Scales = Mapping[int, tuple["torch.Tensor | float", "torch.Tensor | float"]]
"""Scales of K and of V by layer: one number, or [heads, 1, 1] with one for each KV head."""


def kv_cache(config: Any, scales: Scales, round_: Callable[..., torch.Tensor] = round_fp8) -> Any:
    """An empty cache of transformers for the model of that configuration; plain where ``scales`` is empty.

    ``round_(x, scale)`` is what becomes of K and V, [batch, heads, tokens, head_dim].
    """
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """Rounds what it is given, then keeps it."""

        def update(self, key: Any, value: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
            of_key, of_value = scales[layer_idx]
            return super().update(round_(key, of_key), round_(value, of_value), layer_idx, *rest, **named)

    return (RoundingCache if scales else DynamicCache)(config=config)
