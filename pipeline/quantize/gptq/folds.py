"""Folds: channels between two parts of a layer that can be multiplied in one and divided in the other.

    folds, unscaled = study(replica, tokens)                 # of each layer, proven
    folds[layer][0].scale(module, factors)                   # the layer computes what it did

What a norm puts out may have other sizes where all that reads it knows; so may what `up_proj` makes for `down_proj`.
Which norm is read by what is asked of the model: a layer is run, and what enters a module in the memory that a norm has
written to makes it a reader. Each fold is then made with random numbers, in float32, and the layer must compute the
same: what does not is left out, and named. One layer of every kind is studied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantmint.calibration.activations import States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.calls import Call, record
from quantmint.calibration.hooks import widening_products
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica
from quantmint.calibration.weights import held
from quantmint.pipeline.quantize.model.experts import entered_projections, expert_slice, stacks_experts

_TOLERANCE = 1e-4
_TOKENS = 32
_SHARE = 0.9  # of the tokens: some may be sent to another expert by a last bit


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [..., O, I], or [..., I, O] where ``transposed``; ``weight`` is the parameter's name below a layer."""

    weight: str
    transposed: bool = False

    @property
    def module(self) -> str:
        """Return the name of the module that has the weight; for a stack of experts, the parameter's own name."""
        return self.weight.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Fold:
    """Channels that ``weight`` and ``bias`` produce and that ``readers`` take in; names are below a layer.

    ``weight`` is a norm's [C], to which ``offset`` is added before it multiplies, or a projection's [C, I]. ``place``
    is the module that puts out the channels; with ``entering`` it is the only module that they enter, after being
    multiplied by others, and its output is added to the residual stream.
    """

    weight: str
    bias: str | None
    offset: float
    readers: tuple[Matrix, ...]
    place: str
    entering: bool

    @property
    def names(self) -> set[str]:
        """Return the names of the parameters that the fold changes, below a layer."""
        return {self.weight, *((self.bias,) if self.bias else ()), *(reader.weight for reader in self.readers)}

    def scale(self, root: Any, factors: torch.Tensor) -> None:
        """Divide the channels in the layer ``root`` by ``factors``, float32 [C]; multiply what reads them by the same.

        The layer then computes what it did before.
        """
        _change(root, self.weight, lambda w: (w + self.offset) / factors.view(-1, *[1] * (w.ndim - 1)) - self.offset)
        if self.bias is not None:
            _change(root, self.bias, lambda b: b / factors)
        for reader in self.readers:
            _change(root, reader.weight, lambda w, at=reader: w * (factors.view(-1, 1) if at.transposed else factors))


def _change(root: Any, name: str, how: Callable[..., torch.Tensor]) -> None:
    """Replace a parameter by ``how`` of its float32 value; a stack expert by expert, as all would take gigabytes."""
    path, _, last = name.rpartition(".")
    old = root.get_parameter(name).detach()
    new = torch.empty_like(old)
    for before, after in zip(old, new, strict=True) if old.ndim == 3 else [(old, new)]:
        after.copy_(how(before.float()))
    setattr(root.get_submodule(path), last, torch.nn.Parameter(new, requires_grad=False))


def study(replica: Replica, tokens: torch.Tensor) -> tuple[dict[str, tuple[Fold, ...]], list[str]]:
    """Return the folds of each layer by the layer's name, and the names of modules whose channels cannot be scaled.

    Of ``tokens``, int64 [batch, sequence], the start of the first sequence is run, repeated where it is short. Weights
    are loaded and freed one layer at a time.
    """
    layers = replica.walkable.layers
    few = tokens[:1].repeat(1, -(-_TOKENS // tokens.shape[1]))[:, :_TOKENS]
    with replica.around(layers):
        states, calls = next(record(replica, [few]))
    studied: dict[str, tuple[tuple[Fold, ...], list[str]]] = {}
    folds: dict[str, tuple[Fold, ...]] = {}
    unscaled: list[str] = []
    for name, call in zip(layers, calls, strict=True):
        module = replica.model.get_submodule(name)
        kind = repr([(parameter, tuple(part.shape)) for parameter, part in module.named_parameters()]) + str(module)
        # What a layer writes for later ones is theirs alone, whatever its kind.
        if kind not in studied or call.writes:
            weights = held(replica.model, name)
            replica.weights.load(weights)
            trial = _Trial(replica, module, call, states)
            if kind not in studied:
                studied[kind] = trial.folds()
            states = States(states.hidden, {**states.carried, **trial.sound.carried})
            replica.weights.free(weights)
        folds[name], faults = studied[kind]
        unscaled += [f"{name}.{fault}" for fault in faults]
    return folds, unscaled


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _inputs(layer: Any, reader: Matrix) -> int:
    """Return how many channels a matrix reads."""
    return int(layer.get_parameter(reader.weight).shape[-2 if reader.transposed else -1])


def _stacks(layer: Any) -> dict[str, torch.nn.Parameter]:
    """Return the 3-D parameters of a layer that stack experts, by name."""
    return {
        f"{name}.{key}": parameter
        for name, module in layer.named_modules()
        if stacks_experts(module)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def _widened_copy(layer: Any) -> Any:
    """Return a copy of a layer in float32 that shares the layer's stacks of experts, which keep their dtype."""
    shared = {id(stack): stack for stack in _stacks(layer).values()}
    copied = copy.deepcopy(layer, dict(shared))
    for module in copied.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in shared:
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _wide(buffer))
    return copied


class _Trial:
    """One layer in float32, with disturbed norms and biases, and its output for random hidden states.

    The hidden states have the shape of those in ``states``, and the layer gets the tensors carried there. Stacks of
    experts keep their dtype and are widened where they are multiplied: a layer of DeepSeek R1 takes 45 GB in float32.
    """

    def __init__(self, replica: Replica, layer: Any, call: Call, states: States) -> None:
        self._replica, self._call = replica, call.mapped(_wide)
        self._random = torch.Generator().manual_seed(0)
        self._layer = _widened_copy(layer)
        for parameter in self._layer.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * self._randn(*parameter.shape)
        carried = {name: _wide(tensor) for name, tensor in states.carried.items()}
        self._states = States(self._randn(*states.hidden.shape), carried)
        with torch.inference_mode():
            self.sound = self._run(self._layer)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(self._replica.device)

    def _run(self, layer: Any) -> States:
        with widening_products(_stacks(layer)):
            return self._call.run(layer, self._states, empty_cache(self._replica.model))

    def folds(self) -> tuple[tuple[Fold, ...], list[str]]:
        """Return the folds that leave the layer's output unchanged, and the names of the weights of the others.

        The names are without ".weight".
        """
        tried = [*self._of_norms(), *self._inner()]
        good = tuple(fold for fold in tried if self._holds(fold))
        return good, [fold.weight.removesuffix(".weight") for fold in tried if fold not in good]

    def _holds(self, fold: Fold) -> bool:
        # Parameters are shared: the fold replaces those that it changes.
        changed = copy.deepcopy(self._layer, {id(parameter): parameter for parameter in self._layer.parameters()})
        width = len(changed.get_parameter(fold.weight))
        if any(_inputs(changed, reader) != width for reader in fold.readers):
            return False  # a norm of each head, whose heads are read together
        with torch.inference_mode():
            # By powers of two, which no dtype of a weight rounds.
            fold.scale(changed, self._randn(width).round().clamp(-2, 2).exp2())
            sound = self.sound.hidden
            error = (self._run(changed).hidden - sound).norm(dim=-1) / sound.norm(dim=-1)
            return bool(error.flatten().quantile(_SHARE) < _TOLERANCE)

    def _of_norms(self) -> Iterator[Fold]:
        outputs: dict[int, tuple[str, torch.Tensor]] = {}
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        readers: dict[str, dict[Matrix, None]] = {}
        handles = []

        def after(name: str) -> Any:
            def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
                outputs[output.data_ptr()] = name, output  # held, so that its memory is not given to another
                calls[name] = args, kwargs

            return hook

        def before(reading: Sequence[Matrix]) -> Any:
            def hook(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                entering = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
                if entering.data_ptr() in outputs:
                    readers.setdefault(outputs[entering.data_ptr()][0], {}).update(dict.fromkeys(reading))

            return hook

        for name, module in self._layer.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if stacks_experts(module):
                places = [expert_slice(module, name, 0, projection) for projection in entered_projections(module)]
                reading = [Matrix(f"{name}.{place.parameter}", place.transposed) for place in places]
                handles.append(module.register_forward_pre_hook(before(reading), with_kwargs=True))
            elif list(parameters) == ["weight"] and parameters["weight"].ndim == 1:
                handles.append(module.register_forward_hook(after(name), with_kwargs=True))
            elif "weight" in parameters and parameters["weight"].ndim == 2:
                handles.append(module.register_forward_pre_hook(before([Matrix(f"{name}.weight")]), with_kwargs=True))
        with torch.inference_mode():
            self._run(self._layer)
            for handle in handles:
                handle.remove()
            for name, matrices in readers.items():
                offset = self._offset(name, *calls[name])
                if offset is not None:
                    yield Fold(f"{name}.weight", None, offset, tuple(matrices), name, entering=False)

    def _offset(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """Return what a norm adds to its weight before it multiplies by it, 0 or 1; None where it does neither.

        The norm is called with random numbers, or with its recorded arguments where it takes more than one, such as a
        gate.
        """
        module = copy.deepcopy(self._layer.get_submodule(name))
        if len(args) == 1 and not kwargs:
            args = (self._randn(3, len(module.weight)),)

        def vanishes(weight: float) -> bool:
            module.weight.data.fill_(weight)
            return not bool(module(*args, **kwargs).any())

        return next((offset for offset in (0.0, 1.0) if vanishes(-offset)), None)

    def _inner(self) -> Iterator[Fold]:
        for name, module in self._layer.named_modules():
            up, down = (getattr(module, child, None) for child in ("up_proj", "down_proj"))
            listed = "experts" in name.split(".")  # each sees tokens of its own, and few
            if isinstance(up, torch.nn.Linear) and isinstance(down, torch.nn.Linear) and not listed:
                bias, reader = None if up.bias is None else f"{name}.up_proj.bias", Matrix(f"{name}.down_proj.weight")
                yield Fold(f"{name}.up_proj.weight", bias, 0.0, (reader,), f"{name}.down_proj", entering=True)
