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
    from calibration.ranges import Ranges


def scale_ranges(ranges: Ranges, choice: Choice, checkpoint_format: str) -> dict[str, float]:
    """The largest magnitude behind each static scale, by the name of the tensor that holds the scale.

    Inputs of modules with static activations, K and V of every attention layer where the cache is FP8. Raises
    `StageError` for a module whose inputs were not measured.
    """
    found: dict[str, float] = {}
    for module, name in choice.schemes.items():
        if scheme(name).needs_ranges:
            if module not in ranges.inputs:
                raise StageError(
                    f"{module}: {name} needs the range of its inputs, which calibration did not measure.",
                    hint="Experts that the model holds stacked are not observed yet: exclude them, or take ptpc_fp8.",
                )
            found[f"{module}.input_scale"] = float(ranges.inputs[module])
    return {**found, **_kv_ranges(ranges, checkpoint_format)} if choice.kv_cache else found


def _kv_ranges(ranges: Ranges, checkpoint_format: str) -> Mapping[str, float]:
    form = layout(checkpoint_format)
    return {
        name: float(amax.max())
        for attention, keys in ranges.keys.items()
        for name, amax in zip(form.kv_scale_names(attention), (keys, ranges.values[attention]), strict=True)
    }
