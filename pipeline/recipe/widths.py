"""Widths of a model's linear inputs, from its config.json, against the groups of a scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.modules import text_config


@dataclass(frozen=True, slots=True)
class InputWidth:
    """in_features of some modules; `split` where tensor parallelism gives each GPU only its share of them."""

    name: str
    features: int
    split: bool


def input_widths(config: Mapping[str, Any]) -> tuple[InputWidth, ...]:
    """The distinct widths that a config.json declares; what it does not declare is left out."""
    return tuple(_widths(text_config(config)))


def misfit(widths: tuple[InputWidth, ...], divisor: int, gpus: int) -> str | None:
    """Why groups of `divisor` do not fit some width on one or on all GPUs, as what was found; None when all fit."""
    for width in widths:
        if width.features % divisor:
            return f"{width.name} {width.features}"
        if width.split and width.features % (divisor * gpus):
            return f"{width.name} {width.features} over {gpus} GPUs"
    return None


def _widths(config: Mapping[str, Any]) -> Iterator[InputWidth]:
    def number(key: str) -> int:
        value = config.get(key)
        return value if isinstance(value, int) else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    if hidden:
        yield InputWidth("hidden_size", hidden, split=False)
    for key in ("q_lora_rank", "kv_lora_rank"):
        if number(key):
            yield InputWidth(key, number(key), split=False)
    for key in ("intermediate_size", "moe_intermediate_size"):
        if number(key):
            yield InputWidth(key, number(key), split=True)
    if heads:
        head = number("v_head_dim") or number("head_dim") or hidden // heads
        yield InputWidth("num_attention_heads x head_dim", heads * head, split=True)
