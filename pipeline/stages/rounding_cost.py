"""Seconds that GPTQ and the measurement of sensitivities take, beside the forwards of the model.

Both compute in float32, but for GPTQ's sums of X^T X on a GPU, whose 16-bit products are summed in it: 2 t i^2
operations for t tokens of i channels. GPTQ factors each sum, and rounds a weight column by column: a GPU rounds a
group of columns in a few small kernels, which it replays from a graph.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.gptq.latents import STATE_BYTES
from quantmint.pipeline.quantize.gptq.runner import expert_count
from quantmint.pipeline.quantize.gptq.tuning import EVALUATIONS
from quantmint.pipeline.quantize.model.experts import stack_of
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.modules import fused_with
from quantmint.pipeline.stages.rates import Rates

_FACTOR_S: Final = 0.1
_COLUMN_S: Final = 3e-4
"""Of a Hessian's factors, and of a column of a weight; seen on two cores of an AMD EPYC for 256 to 1,536 channels."""
_GPU_FACTOR_S: Final = 0.02
_GPU_COLUMN_S: Final = 0.7e-5
"""The same on a GPU: what the 43.3 s of GPTQ alone of an 8B shape on an H200 leave (docs/notes/measurements.md)."""
_STEP_S: Final = 2e-2
"""Of a layer in a step of tuning on a GPU, for the launches of some hundred small kernels."""
_FORWARDS_OF_A_STEP: Final = 4
_ROUNDINGS_OF_A_STEP: Final = 4
"""Times that a weight's kernel takes, in a step that learns its rounding: 3.3 of mxfp4 and 4.8 of w4a16 on a core."""
_MOVED_BY_A_STEP: Final = 24
_MOVED_BY_A_FORWARD: Final = 4
"""Bytes of a latent weight between host memory and a GPU: twice float32 there, and all with moments there and back."""
_SIDE_BY_SIDE: Final = 10
"""Experts of a stack that are rounded in the time of one (`make bench-experts`)."""
_CHANGE_S: Final = 0.01
"""Of one group of modules in one scheme for one sample: hooks, and inputs rounded as they are served."""
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")

Shapes = Mapping[str, tuple[int, int]]
"""Rows and columns of each linear weight, by its module."""


def rounding_seconds(shapes: Shapes, names: Collection[str], rates: Rates) -> float:
    """Return the seconds in which GPTQ factors Hessians and rounds the weights, once in each scheme that it supports.

    ``shapes`` are [out_features, in_features] by module, ``names`` the schemes.
    """
    schemes = [name for name in names if algorithm("gptq").refusal("stream", name) is None]
    seconds, on_cpu = 0.0, rates.link is None
    factor_s, column_s = (_FACTOR_S, _COLUMN_S) if on_cpu else (_GPU_FACTOR_S, _GPU_COLUMN_S)
    for module, (rows, columns) in shapes.items():
        alone = factor_s + column_s * columns
        share = _SIDE_BY_SIDE if _EXPERT.search(module) else 1
        products = 2.0 * (columns**3 + rows * columns**2)
        seconds += alone / share + products / rates.float32
    return seconds * len(schemes)


def hessian_seconds(shapes: Shapes, tokens: float, share: float, rate: float, *, sums: int) -> float:
    """Return the seconds of ``sums`` products X^T X over ``tokens`` tokens, once for modules that share inputs.

    ``shapes`` are [out_features, in_features] by module, ``share`` the share of the experts that a token passes
    through, ``rate`` the operations of such products per second.
    """
    groups = {fused_with(module) or module: (module, shape) for module, shape in shapes.items()}
    operations = sum(
        2.0 * tokens * (share if _EXPERT.search(module) else 1.0) * columns**2
        for module, (_, columns) in groups.values()
    )
    return sums * operations / rate


def expert_passes(structure: Structure, shapes: Shapes, free: int, *, on_gpu: bool) -> int:
    """Return how often GPTQ runs a layer for its experts, of all layers together.

    A pass sums the Hessians of as many experts of one of the model's stacks as fit (`GptqRunner.steps`). ``shapes`` are
    [out_features, in_features] of the modules that are rounded, ``free`` the bytes of a device's memory beside the
    model and the hidden states.
    """
    names = frozenset(structure.stacks)
    stacks: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for module, shape in shapes.items():
        inside = structure.modules[module]
        if (stack := stack_of(inside, names)) is not None:
            stacks.setdefault(stack, {}).setdefault(inside.rpartition(".")[2], []).append(shape)
    passes = 0
    for projections in stacks.values():
        experts = max(map(len, projections.values()))
        rows, columns = sum(members[0][0] for members in projections.values()), next(iter(projections.values()))[0][1]
        passes += -(-experts // expert_count(free // 4, max(rows, columns), columns, on_gpu=on_gpu))
    return passes


def tuning_seconds(flops: float, layers: int, steps: int, evaluated: float, rates: Rates) -> float:
    """Return the seconds of ``steps`` steps of tuning through ``layers`` layers.

    ``flops`` are the operations of a forward of one batch through all layers, ``evaluated`` the batches that are held
    out. A step is a forward, and a backward that runs each layer again. The time to read the weights is not counted.
    """
    rate, launches = (rates.float32, 0.0) if rates.link is None else (rates.flops, _STEP_S * layers * steps)
    return launches + (_FORWARDS_OF_A_STEP * steps + (EVALUATIONS + 1) * evaluated) * flops / rate


def learning_seconds(learned: Mapping[str, int], steps: int, evaluated: float, rates: Rates, *, on_host: bool) -> float:
    """Return the seconds that tuning takes longer where it learns the rounding of weights.

    ``learned`` are the numbers of these weights by kernel, ``evaluated`` the batches that are held out. A forward
    rounds each weight in its kernel's time, and the steps' state is written at each evaluation. With ``on_host`` a GPU
    gets latent weights from the host's memory, which is not pinned, as fast as layers from a file. Launches for weights
    too small to keep a GPU busy, such as those of many experts, are not counted.
    """
    count, forwards = sum(learned.values()), (EVALUATIONS + 1) * evaluated
    once = sum(2 * number / rates.kernel(kernel) for kernel, number in learned.items())
    moved = (_MOVED_BY_A_STEP * steps + _MOVED_BY_A_FORWARD * forwards) * count if on_host else 0.0
    saved = EVALUATIONS * STATE_BYTES * count / rates.sync
    return (_ROUNDINGS_OF_A_STEP * steps + forwards) * once + moved / rates.load + saved


def change_seconds(shapes: Shapes, names: Collection[str], samples: int) -> float:
    """Return the seconds, beside matrix products, of changing all groups: once for each scheme and sample."""
    groups = {fused_with(module) or module for module in shapes}
    return _CHANGE_S * len(groups) * len(names) * samples
