"""Seconds that GPTQ and the measurement of sensitivities take, beside the forwards of the model.

Both compute in float32. GPTQ sums X^T X of what enters each module, 2 t i^2 operations for t tokens of i channels,
factors it, and rounds a weight column by column: on any device a column costs the launches of a few small kernels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.recipe.modules import fused_with
from quantmint.pipeline.stages.rates import Rates

_FACTOR_S: Final = 0.1
_COLUMN_S: Final = 3e-4
"""Of a Hessian's factors, and of a column of a weight; seen on two cores of an AMD EPYC for 256 to 1,536 channels."""
_SIDE_BY_SIDE: Final = 10
"""Experts of a stack that are rounded in the time of one (`make bench-experts`)."""
_CHANGE_S: Final = 0.01
"""Of one group of modules in one scheme for one sample: hooks, and inputs rounded as they are served."""
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")

Shapes = Mapping[str, tuple[int, int]]
"""Rows and columns of each linear weight, by its module."""


def rounding_seconds(shapes: Shapes, names: Collection[str], rates: Rates) -> float:
    """Return the seconds that GPTQ takes to factor Hessians and to round weights, each once in each scheme."""
    schemes = [name for name in names if algorithm("gptq").refusal("stream", name) is None]
    seconds = 0.0
    for module, (rows, columns) in shapes.items():
        alone = _FACTOR_S + _COLUMN_S * columns
        share = _SIDE_BY_SIDE if _EXPERT.search(module) else 1
        products = 2.0 * (columns**3 + rows * columns**2)
        seconds += alone / share + products / rates.float32
    return seconds * len(schemes)


def hessian_seconds(shapes: Shapes, tokens: float, share: float, rates: Rates, *, sums: int) -> float:
    """Return the seconds of ``sums`` products X^T X over the calibration tokens, once for modules that share inputs.

    ``share`` is that of the experts that a token passes through.
    """
    groups = {fused_with(module) or module: (module, shape) for module, shape in shapes.items()}
    operations = sum(
        2.0 * tokens * (share if _EXPERT.search(module) else 1.0) * columns**2
        for module, (_, columns) in groups.values()
    )
    return sums * operations / rates.float32


def change_seconds(shapes: Shapes, names: Collection[str], samples: int) -> float:
    """Return the seconds beside products that the changes of all groups take, in each scheme for each sample."""
    groups = {fused_with(module) or module for module in shapes}
    return _CHANGE_S * len(groups) * len(names) * samples
