"""From measured ranges to the static scales of a checkpoint.

Every engine that writes static scales takes them from here, so that they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import StageError
from pipeline.formats.layout import Choice, layout
from pipeline.schemes import scheme

if TYPE_CHECKING:
    import torch

    from calibration.ranges import Ranges


def scale_ranges(ranges: Ranges, choice: Choice, checkpoint_format: str) -> dict[str, torch.Tensor]:
    """The largest magnitudes behind each static scale, by the name of the tensor that holds the scale.

    Inputs of modules with static activations, K and V of every attention layer where the cache is FP8: float32, as
    many as the stored tensor has scales, [1] or [H_kv]. Raises `StageError` for a module whose inputs were not
    measured.
    """
    found: dict[str, torch.Tensor] = {}
    for module, name in choice.schemes.items():
        if scheme(name).needs_ranges:
            if module not in ranges.inputs:
                raise StageError(
                    f"{module}: {name} needs the range of its inputs, which calibration did not measure.",
                    hint="It is no part of what the model runs on text: exclude it, or take ptpc_fp8.",
                )
            found[f"{module}.input_scale"] = ranges.inputs[module].reshape(1)
    return {**found, **_kv_ranges(ranges, choice, checkpoint_format)} if choice.kv_cache else found


def _kv_ranges(ranges: Ranges, choice: Choice, checkpoint_format: str) -> Mapping[str, torch.Tensor]:
    form = layout(checkpoint_format)
    return {
        name: amax if choice.kv_per_head else amax.max().reshape(1)
        for attention, keys in ranges.keys.items()
        for name, amax in zip(form.kv_scale_names(attention), (keys, ranges.values[attention]), strict=True)
    }
