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

    Modules that read the same input share a step, and so do experts' modules of the same name. Modules that add to the
    hidden states are known by the layer's output, if it is the input and what these modules return and no more. A
    sublayer whose output is that of such a module can be skipped later, unless the layer writes for later layers.
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
    """Record what a hook behind each module of a layer sees.

    ``steps`` are the numbers of steps by kind of module, ``outputs`` those of linear modules with the shape of the
    hidden states, and ``ends`` the sublayers that return one of them.
    """

    def __init__(self, layer: str, linear: frozenset[str], hidden: torch.Tensor) -> None:
        self._linear, self._shape = linear, hidden.shape
        self._last: tuple[Any, int] | None = None
        self.steps: dict[str, int] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.ends: dict[str, tuple[str, int | None]] = {}

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Take the arguments and the result of a module's call."""
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
    """Return a module's name without the number of its expert."""
    return re.sub(r"\.\d+\.", ".#.", name)
