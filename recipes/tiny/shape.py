"""Outlier channels for a trained model, by a rescaling that leaves its function as it was, to the last bit.

Large models grow a few channels whose activations are many times the rest, with weights to match that are small. A tiny
model does not, and so it flatters formats in which neighbours share a scale. Here one channel in every group of 32
behind each RMSNorm is turned up by a power of two, and the columns that read it are turned down by the same. In 16 bit
and in FP8 with a scale for a whole row that costs nothing, because those numbers carry exponents of their own. Where 32
neighbours share one exponent and have four bits each, the small column is rounded away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

GROUP = 32
FACTOR = 8.0
"""A power of two, so that nothing is rounded; large enough to flush a column in E2M1, small enough for FP8 inputs."""


def add_outlier_channels(model: LlamaForCausalLM, *, seed: int, factor: float = FACTOR) -> None:
    """Turn up one channel in each group of 32 behind every RMSNorm of a layer, in place."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            width = norm.weight.numel()
            channels = torch.arange(0, width, GROUP) + torch.randint(GROUP, (width // GROUP,), generator=generator)
            channels = channels.to(norm.weight.device)
            with torch.no_grad():
                norm.weight[channels] *= factor
                for reader in readers:
                    reader.weight[:, channels] /= factor
