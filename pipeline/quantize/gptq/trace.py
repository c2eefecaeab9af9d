"""Find out in which order a layer runs its linear modules, and what becomes of their outputs, by one forward."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quantmint.calibration.activations import States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.calls import Call
from quantmint.calibration.hessians import LayerTrace
from quantmint.calibration.hooks import entering, following
from quantmint.calibration.lazy import torch

_ALIKE = 0.02  # share of what a layer adds that may be lost to the rounding of 16-bit sums


def trace_layer(model: Any, layer: str, linear: Collection[str], call: Call, states: States) -> LayerTrace:
    """Run a layer on the states of a batch, and return the trace of its ``linear`` modules.

    Modules that read the same input share a step, as do experts' modules of the same name. Modules count as adding to
    the hidden states if the layer's output is its input plus the outputs of these modules, up to rounding. A sublayer
    whose output is that of such a module can be skipped later, unless the layer writes for later layers.
    """
    forward = _ForwardRecord(layer, frozenset(linear), states.hidden)
    below = [f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_modules() if name]
    with following(model, below, forward.see):
        output = call.run(model.get_submodule(layer), states, empty_cache(model)).hidden
    count = len(set(forward.steps.values()))
    steps = [[name for name in linear if forward.steps.get(_kind(name)) == step] for step in range(count)]
    # A module that reads an input with others (q of as many heads as k and v) returns another thing of the same shape.
    alone = {name: tensor for name, tensor in forward.outputs.items() if [name] in steps}
    residue = (output - sum(alone.values(), states.hidden)).float()
    adds = bool(alone) and float(residue.norm()) <= _ALIKE * float((output - states.hidden).float().norm())
    ends = {} if call.writes else {name: forward.ends[name] for name in alone if name in forward.ends}
    return LayerTrace(steps, frozenset(alone if adds else ()), ends)


class _ForwardRecord:
    """Record of the calls of all modules of a layer during one forward.

    ``steps`` maps a kind of linear module to the number of its step, ``outputs`` a linear module to its output if that
    has the shape of the hidden states, and ``ends`` such a module to the sublayer that returns this output.
    """

    def __init__(self, layer: str, linear: frozenset[str], hidden: torch.Tensor) -> None:
        self._linear, self._shape = linear, hidden.shape
        self._last: tuple[Any, int] | None = None
        self.steps: dict[str, int] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.ends: dict[str, tuple[str, int | None]] = {}

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Record a call of module ``name`` with its arguments and its output."""
        if name not in self._linear:
            first, extra = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
            if extra is None or all(value is None for value in extra):
                count = None if extra is None else len(extra)
                inside = [module for module in self.outputs if module.startswith(f"{name}.")]
                self.ends |= {module: (name, count) for module in inside if self.outputs[module] is first}
            return
        tensor = entering(args, kwargs)
        kind = _kind(name)
        if kind not in self.steps:
            is_same = self._last is not None and tensor is self._last[0]
            self.steps[kind] = self._last[1] if self._last is not None and is_same else len(set(self.steps.values()))
        self._last = tensor, self.steps[kind]
        if output.shape == self._shape:
            self.outputs[name] = output


def _kind(name: str) -> str:
    """Return a module's name with # for the number of its expert, or for any number inside the name."""
    return re.sub(r"\.\d+\.", ".#.", name)
