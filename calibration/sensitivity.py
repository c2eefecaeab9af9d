"""Measure the cost of changes of single modules, in nats of KL, with one layer in memory at a time.

A change of a module moves what it returns for a token by d. To second order the KL divergence of the model's
predictions is then half of the mean of (g d)^2, where g is the gradient, at the module's output, of the log-likelihood
of tokens drawn from the model's own predictions (the Fisher information). One pass through the layers keeps what enters
each of them; one pass back takes g from layer to layer, and runs each module once for each of its changes.

All is computed in float32: what FP8 costs would be lost in the last bit of bfloat16. Alone a change may cost less, as
the layer makes up for it; of many together none does, and they cost about the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.calibration.activations import States, digest_of, storing
from quantmint.calibration.caches import empty_cache, recording_cache
from quantmint.calibration.calls import Call, answering, record
from quantmint.calibration.durable import whole
from quantmint.calibration.hooks import entering, following, preceding, watching
from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.parts import head_name, language_model, running
from quantmint.calibration.ranges import ranges_of, require_sound
from quantmint.calibration.replica import Replica
from quantmint.calibration.weights import held


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """A named alternative form of some ``modules``, by the model's names; it holds in the context ``changed()``."""

    name: str
    modules: tuple[str, ...]
    changed: Callable[[], AbstractContextManager[None]]


Tensors = Mapping[str, "torch.Tensor"]
Changes = Callable[[str, Tensors, Callable[[], Tensors]], Sequence[ModuleChange]]
"""Takes the name of a layer, the largest magnitude of each linear module's inputs there by name on disk, and what
measures X^T X of the inputs [tokens, in_features] of each, by the model's own names: another pass through the layer."""


def measure(
    replica: Replica,
    samples: Sequence[torch.Tensor],
    changes: Changes,
    work: Path,
    facts: Any,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """Return the cost of every change, in nats per token, resuming at the last layer that an earlier attempt finished.

    Changes of modules that no gradient reaches are left out.

    ``replica`` has nothing loaded; ``samples`` are int64 token ids of [sequence]. ``work`` is a folder for what enters
    the layers, as large as the hidden states of all layers; ``facts`` are plain values that must be equal for an
    attempt to be resumed. ``advance`` is called with a number of samples after each layer, on the way forward and on
    the way back.

    Raises `CalibrationError` where a measured number is not finite, weights are missing or the disk is full, and
    `NotReplayableError` where the layers cannot be run one at a time.
    """
    layers = replica.walkable.layers
    batches = [sample.unsqueeze(0) for sample in samples]
    identity = digest_of([facts, sorted(replica.owned.items())], batches)
    stored = _KeptStates(work, identity)
    with replica.around(layers, *held(replica.model, head_name(replica.model))):
        recorded = list(record(replica, batches))
        sweep = _Sweep(replica, layers, _wide([call for _, call in recorded]), sum(map(len, samples)))
        back = stored.first("gradient", range(len(layers) + 1))
        if back is None:
            start = stored.first("states", reversed(range(len(layers) + 1)))
            if start is None:
                stored.write("states", start := 0, [states for states, _ in recorded])
            advance(start * len(samples))
            for number in range(start, len(layers)):
                stored.write("states", number + 1, *sweep.through(number, stored.read("states", number)[0]))
                advance(len(samples))
            back = len(layers)
            leaving = [states.hidden for states in stored.read("states", back)[0]]
            stored.write("gradient", back, _of_predictions(replica, layers, recorded[0][1][-1], batches, leaving))
        else:
            advance((2 * len(layers) - back) * len(samples))
    for number in reversed(range(back)):
        largest = {name: torch.tensor(value) for name, value in stored.read("states", number + 1)[1].items()}
        states, gradient = stored.read("states", number)[0], stored.read("gradient", number + 1)[0]
        stored.write("gradient", number, *sweep.back(number, states, gradient, changes, largest))
        stored.drop("states", number + 1)
        advance(len(samples))
    return {name: cost for number in range(len(layers)) for name, cost in stored.read("gradient", number)[1].items()}


class _Sweep:
    """Runs a model's layers forward and backward, one loaded at a time, over samples of ``tokens`` tokens in all."""

    def __init__(self, replica: Replica, layers: Sequence[str], calls: Sequence[Sequence[Call]], tokens: int) -> None:
        self._replica, self._layers, self._calls, self._tokens = replica, layers, calls, tokens

    def through(self, number: int, states: Sequence[States]) -> tuple[list[States], dict[str, float]]:
        """Run layer ``number`` on all samples; return the states behind it, and its modules' largest input magnitudes.

        The magnitudes are keyed by the linear module's name on disk. Raises `CalibrationError` where one is not finite.
        """
        replica, name = self._replica, self._layers[number]
        measurement = Measurement(Observation(experts="routed"))
        with self._loaded(number) as module, watching(replica.model, name, measurement), torch.no_grad():
            outputs = [
                self._run(number, index, module, entering_states, measurement)
                for index, entering_states in enumerate(states)
            ]
        magnitudes = measurement.finish()
        require_sound(replica, magnitudes, f"{name}.")
        inputs = ranges_of(replica, magnitudes).inputs
        return outputs, {module: float(amax) for module, amax in inputs.items()}

    def back(
        self,
        number: int,
        states: Sequence[States],
        gradient: Sequence[States],
        changes: Changes,
        largest: Mapping[str, torch.Tensor],
    ) -> tuple[list[States], dict[str, float]]:
        """Return the gradients at the input of layer ``number`` from those at its output, and the costs of its changes.

        Costs are nats per token, by the change's name; ``largest`` are the input magnitudes of the layer's linear
        modules.
        """
        entering_slopes: list[States] = []
        with self._loaded(number) as module:
            layer_changes = changes(self._layers[number], largest, partial(self._hessians, number, states))
            costs = dict.fromkeys((change.name for change in layer_changes), 0.0)
            sites = {change.name: self._sites(change.modules) for change in layer_changes}
            names = {name for of_change in sites.values() for name in of_change}
            for index, sample_states in enumerate(states):
                entering = sample_states.to(self._replica.device)
                with _seen(self._replica.model, names) as calls:
                    leaves = input_leaves(entering)
                    leaving = self._run(number, index, module, entering, None)
                # No gradient passes scores that only choose, as a sparse indexer's: such changes have no cost.
                outputs = {name: out for name, (*_, out) in calls.items() if out.requires_grad}
                layer_changes = [
                    change for change in layer_changes if all(name in outputs for name in sites[change.name])
                ]
                before, within = layer_slopes(leaving, gradient[index].to(self._replica.device), leaves, outputs)
                entering_slopes.append(States(before.pop(HIDDEN), before))
                for change in layer_changes:
                    with change.changed(), torch.no_grad():
                        costs[change.name] += self._cost(
                            [(calls[name], within[name], name) for name in sites[change.name]]
                        )
        return entering_slopes, {change.name: costs[change.name] / (2 * self._tokens) for change in layer_changes}

    def _hessians(self, number: int, states: Sequence[States]) -> dict[str, torch.Tensor]:
        model, name, hessians = self._replica.model, self._layers[number], dict[str, "torch.Tensor"]()
        inside = [
            f"{name}.{part}"
            for part, module in model.get_submodule(name).named_modules()
            if isinstance(module, torch.nn.Linear)
        ]

        def see(of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            rows = entering(args, kwargs).flatten(0, -2)
            hessians[of] = rows.t() @ rows if of not in hessians else hessians[of].addmm_(rows.t(), rows)

        with preceding(model, inside, see), torch.no_grad():
            for index, sample_states in enumerate(states):
                self._run(number, index, model.get_submodule(name), sample_states, None)
        return hessians

    def _sites(self, modules: Iterable[str]) -> list[str]:
        """Return the modules at whose outputs a change of some modules is measured.

        These are the modules themselves, which all see the same tokens. Experts in a list each see some tokens or none:
        the module that holds the list stands for them.
        """
        model = self._replica.model

        def site(name: str) -> str:
            listed = name.rpartition(".experts.")[0]
            holds = bool(listed) and isinstance(model.get_submodule(f"{listed}.experts"), torch.nn.ModuleList)
            return listed if holds else name

        return list(dict.fromkeys(map(site, modules)))

    def _cost(self, changed: Sequence[tuple[_Call, torch.Tensor, str]]) -> float:
        """Return the sum of (g d)^2 over all tokens, where the modules of ``changed`` count together.

        ``changed`` has, for each module, its call, the gradient g at its output, and its name; d is the change of its
        output.
        """
        moved = [
            ((_first(self._replica.model.get_submodule(name)(*args, **kwargs)) - out) * slope).flatten(0, -2)
            for (args, kwargs, out), slope, name in changed
        ]
        products = sum(product.sum(dim=-1).double() for product in moved)
        return float(products.square().sum())

    @contextmanager
    def _loaded(self, number: int) -> Iterator[Any]:
        replica, name = self._replica, self._layers[number]
        names, module = held(replica.model, name), replica.model.get_submodule(name)
        dtype = next(module.parameters()).dtype
        # Buffers that no checkpoint holds would come back rounded.
        buffers = [
            (part, key, part._buffers[key]) for part in module.modules() for key in part._non_persistent_buffers_set
        ]
        replica.weights.load(names)
        try:
            yield module.float()
        finally:
            replica.weights.free(names)
            module.to(dtype)
            for part, key, buffer in buffers:
                part._buffers[key] = buffer

    def _run(self, number: int, index: int, module: Any, states: States, measurement: Measurement | None) -> States:
        model = self._replica.model
        cache = empty_cache(model) if measurement is None else recording_cache(model, measurement)
        leaving = self._calls[index][number].run(module, states.to(self._replica.device), cache)
        if measurement is not None:
            measurement.end_batch()
        return leaving


HIDDEN = "hidden"
_Call = tuple[tuple[Any, ...], Mapping[str, Any], "torch.Tensor"]
"""What a module was called with, apart from all gradients, and what it returned."""


@contextmanager
def _seen(model: Any, names: Iterable[str]) -> Iterator[dict[str, _Call]]:
    """Within the block, collect the calls of the named modules, each called once: arguments without gradients, output.

    Of a tuple that a module returns, the first element is its output.
    """
    calls: dict[str, _Call] = {}

    def plain(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    def see(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        calls[name] = tuple(map(plain, args)), {key: plain(value) for key, value in kwargs.items()}, _first(out)

    with following(model, sorted(names), see):
        yield calls


def input_leaves(states: States) -> dict[str, torch.Tensor]:
    """Require gradients of the floating-point tensors of ``states``; return them by name, the hidden states first."""
    tensors = {HIDDEN: states.hidden, **states.carried}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor.is_floating_point()}


def layer_slopes(
    leaving: States, gradient: States, leaves: Mapping[str, torch.Tensor], within: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients at a layer's inputs ``leaves`` and at the tensors ``within``, from those at its outputs.

    Carried inputs that the layer does not use are left out of the former; unused tensors within get zeros.
    """
    outputs = [leaving.hidden, *(leaving.carried[name] for name in gradient.carried)]
    inputs = [*leaves.values(), *within.values()]
    slopes = torch.autograd.grad(outputs, inputs, [gradient.hidden, *gradient.carried.values()], allow_unused=True)
    count = len(leaves)
    before = {name: slope for name, slope in zip(leaves, slopes[:count], strict=True) if slope is not None}
    pairs = zip(within.items(), slopes[count:], strict=True)
    return before, {name: torch.zeros_like(out) if slope is None else slope for (name, out), slope in pairs}


def _first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


def _of_predictions(
    replica: Replica,
    layers: Sequence[str],
    last: Call,
    batches: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
) -> list[States]:
    """Return, for each batch, the gradient of the log-loss of drawn tokens at the last layer's output, in float32.

    The tokens are drawn from the model's own predictions, with a fixed seed. ``states`` are the hidden states that
    leave the last layer, ``last`` is its recorded call.
    """
    from torch.nn.functional import cross_entropy

    draw = torch.Generator(replica.device).manual_seed(0)
    gradients: list[States] = []
    for batch, hidden in zip(batches, states, strict=True):
        leaf = hidden.to(replica.device).requires_grad_()
        leaving = last.returned(leaf.to(replica.model.dtype))
        logits = model_logits(replica, layers, batch.to(replica.device), leaving)[0].float()
        targets = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw).squeeze(1)
        gradients += map(States, torch.autograd.grad(cross_entropy(logits, targets, reduction="sum"), leaf))
    return gradients


def model_logits(replica: Replica, layers: Sequence[str], batch: torch.Tensor, leaving: Any) -> torch.Tensor:
    """Return the logits, [1, sequence, vocabulary], that the model computes from the last layer's output ``leaving``.

    The ``layers`` are not run: they return ``leaving``. ``batch`` are the token ids.
    """
    with answering(replica.model, layers, leaving), running("this model on text alone"):
        logits: torch.Tensor = language_model(replica.model)(input_ids=batch, use_cache=False).logits
    return logits


def _wide(calls: list[list[Call]]) -> list[list[Call]]:
    """Return recorded calls with their floating-point tensors in float32, usable where gradients are computed."""
    converted: dict[int, torch.Tensor] = {}

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in converted:
            converted[id(tensor)] = tensor.clone().float() if tensor.is_floating_point() else tensor.clone()
        return converted[id(tensor)]

    return [[call.mapped(wide) for call in of_sample] for of_sample in calls]


class _KeptStates:
    """Files of the states of all samples between two layers, with a few facts; a file appears only when it is complete.

    Files in ``folder`` of another ``identity`` are removed.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder, self._suffix = folder, f".{identity[:16]}.pt"
        with storing("the hidden states", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if not path.name.endswith(self._suffix):
                    path.unlink()

    def write(self, kind: str, number: int, states: Sequence[States], facts: Any = None) -> None:
        path = self._path(kind, number)
        rows = [
            (
                sample_states.hidden.float().cpu().contiguous(),
                {name: tensor.cpu() for name, tensor in sample_states.carried.items()},
            )
            for sample_states in states
        ]
        with storing("the hidden states", path), whole(path) as partial:
            torch.save((rows, facts), partial)

    def read(self, kind: str, number: int) -> tuple[list[States], dict[str, float]]:
        """Return the states, whose tensors are mapped from the file, and the facts stored with them."""
        path = self._path(kind, number)
        with storing("the hidden states", path):
            rows, facts = torch.load(path, mmap=True, weights_only=True)
            return [States(*row) for row in rows], facts

    def drop(self, kind: str, number: int) -> None:
        self._path(kind, number).unlink()

    def first(self, kind: str, numbers: Iterable[int]) -> int | None:
        return next((number for number in numbers if self._path(kind, number).is_file()), None)

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:05}{self._suffix}"
