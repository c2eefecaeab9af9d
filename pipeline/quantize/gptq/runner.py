"""Run a model layer by layer while its weights change: collect statistics, apply weights, go on to the next layer.

Each batch goes through a layer several times: for the statistics of each step's modules, and at last with the weights
that were put in place, whose hidden states enter the next layer. Inputs are rounded each time as they will be when the
model is served. So every layer sees what was lost before it. Memory is that of two layers, of the hidden states, and of
one layer's Hessians.

On several devices each takes its share of the batches through a layer of its own. The batches lie in a fixed number of
parts, each summed by itself; the first device adds the parts in their order, and weights that are applied there are
handed to the others. So the bytes are the same on however many devices of one kind.

With a reference model, the 16-bit model whose hidden states run along, a layer gets its weights in steps: modules that
read the same input are one, and the next step's inputs are those that the last one's weights make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from quantmint.calibration.activations import Activations, States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.experts import ExpertCollector, rounding_experts, stacks
from quantmint.calibration.hessians import InputStatistics, LayerTrace, StatisticsCollector, TensorCache
from quantmint.calibration.hooks import entering, following
from quantmint.calibration.inputs import Rounding
from quantmint.calibration.layers import PARTS, LayerRunner
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica
from quantmint.calibration.room import free_bytes
from quantmint.pipeline.quantize.device import map_devices
from quantmint.pipeline.quantize.gptq.trace import trace_layer

_Collector = TypeVar("_Collector", StatisticsCollector, ExpertCollector)
_ROWS = 1024  # of a sample
_SEQUENCES = 16  # that its rows are taken from
EXPERT_SUMS = 6 << 30
"""Bytes of the Hessians that a step of experts sums on a device; a GPU with ample room sums up to four times as many,
since every step runs the layer again."""
_HELD_OUT = 1024  # tokens, whose rows are kept one by one
_HELD_OUT_SHARE = 8  # one of so many tokens at most
_STACK = 1 << 30  # bytes in float32 of the Hessians, or of the weights, that a GPU rounds side by side


@dataclass(frozen=True, slots=True)
class InputRoundings:
    """Roundings, as served, of the inputs of the modules that get new weights, by the model's names.

    ``linear`` are those of linear modules: modules with the same input and the same function object share one Hessian.
    ``experts`` are those of stacked experts, keyed by ``{stack}.{expert number}``; ``expert_columns`` is the number of
    inputs of an expert of each stack.
    """

    linear: dict[str, Rounding]
    experts: dict[str, Rounding] = field(default_factory=dict)
    expert_columns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinearStep:
    """Linear ``modules`` of a layer that get weights together: none of them changes the inputs of another.

    ``is_last`` marks the last linear step of the layer.
    """

    layer: int
    modules: Sequence[str]
    is_last: bool


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """Some ``experts`` of a ``stack``, a parameter [E, ., .]; ``is_last`` marks the last step of that stack."""

    layer: int
    stack: str
    experts: range
    is_last: bool


RunnerStep = LinearStep | ExpertStep


@dataclass(frozen=True, slots=True)
class NewWeight:
    """A ``weight`` to replace a model's ``parameter``, or the part of the parameter that ``view`` returns."""

    parameter: str
    weight: torch.Tensor
    view: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class InputSample:
    """A sample of a module's inputs or outputs: some ``rows``, [n, I] in the model's dtype.

    ``largest`` is the largest magnitude of each channel over all tokens that were run, float32 [I].
    """

    rows: torch.Tensor
    largest: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DeviceShare:
    """A device's replica and the numbers of its batches, with the state of the current layer there.

    ``source_weights`` are the reference model's; ``cache`` holds intermediate tensors of the batches.
    """

    replica: Replica
    batches: Sequence[int]
    source_weights: Mapping[str, torch.Tensor]
    cache: TensorCache


@dataclass(frozen=True, slots=True)
class _LayerState:
    """State of the current layer: roundings of its linear modules, stacks of experts, trace, and device shares.

    ``pooled`` is X^T X over all tokens of all experts, by the stack, once the stack's first step has summed it.
    """

    name: str
    linear: Mapping[str, Rounding]
    stacks: Sequence[str]
    trace: LayerTrace
    shares: Sequence[_DeviceShare]
    pooled: dict[str, torch.Tensor | None] = field(default_factory=dict)


class GptqRunner(LayerRunner):
    """Iterate over a model's layers while they get new weights, resuming at the last layer that was committed.

    ::

        with torch.inference_mode(), GptqRunner(..., reference=True) as runner:
            runner.record()
            for layer in runner:
                for step in runner.steps(layer):
                    statistics = runner.collect(step)
                    runner.apply(step, solve(statistics))
                runner.finish(layer)

    ``replicas``, one for each device and no more than batches, have nothing loaded; the caller reads and changes the
    weights of the first. ``batches`` are int64 token ids of [batch, sequence]. ``facts`` are plain values that must be
    equal for a run to be resumed. With ``reference`` the 16-bit model runs along, and hidden states take twice the
    room. ``advance`` is called with numbers of samples, each sample once for every layer. A layer's results must be
    flushed to the disk before `finish`, since a resumed run does not repeat that layer.

    Raises `CalibrationError` where weights are missing or the disk is full, and `NotReplayableError` where the layers
    cannot be run one at a time.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        batches: Sequence[torch.Tensor],
        activations: Activations,
        facts: Any,
        advance: Callable[[int], None],
        roundings: InputRoundings,
        *,
        reference: bool,
    ) -> None:
        facts = [facts, sorted(replicas[0].owned.items()), {"parts": PARTS}]
        super().__init__(replicas, batches, activations, facts, advance)
        self.roundings, self._reference = roundings, reference
        self._held_out = self._held_out_rows(range(len(batches)))
        self._summed = len(self.parts)
        self._traces: dict[tuple[str, ...], tuple[str, LayerTrace]] = {}
        self._lock = threading.Lock()
        self._state: _LayerState

    def hold_out(self, share: float) -> list[int]:
        """Keep a share of the batches, in whole parts and of one part at least, out of all statistics.

        Return the numbers of these batches: none where there is a single one. Call it before the first layer.
        """
        count = len(self.parts)
        self._summed = max(1, min(count - 1, count - round(share * count)))
        summed = sorted(chain(*self.parts[: self._summed]))
        self._held_out = self._held_out_rows(summed)
        return sorted(chain(*self.parts[self._summed :]))

    def _held_out_rows(self, numbers: Sequence[int]) -> dict[str, dict[int, torch.Tensor]]:
        """Return the numbers of the held-out rows by device and batch, of the batches with these ``numbers``.

        They lie on the devices from here on: a copy in the middle of a layer would wait for all that is computed.
        """
        rows = held_out_rows([self.batches[number] for number in numbers])
        return {
            device: {number: of_batch.to(device) for number, of_batch in zip(numbers, rows, strict=True)}
            for device in {replica.device for replica in self.replicas}
        }

    def reference_states(self) -> list[States]:
        """Return the reference model's states behind the last layer, by batch, on the CPU. Call it after that layer."""
        return [self.activations.get(number, "cpu")[0] for number in range(len(self.batches))]

    def steps(self, layer: int) -> Iterator[RunnerStep]:
        """Yield the steps in which a layer gets its weights: linear modules, then its stacks of experts.

        A step takes as many experts as their Hessians, of a part of the batches and of all, fit in half of the free
        memory, rounded down to whole stacks of those that a GPU rounds side by side: so the bytes do not depend on the
        memory.
        """
        self._state = state = self._begin(layer)
        model = self.replica.model
        for modules in state.trace.steps if state.linear else ():
            yield LinearStep(layer, modules, modules is state.trace.steps[-1])
        if state.stacks and self._reference:  # whose experts are gone once new weights lie in their place
            map_devices(partial(self._set_reference_aside, layer), state.shares)
        for name in state.stacks:
            if self.replica.weights.is_mapped(name):
                _set(model, name, model.get_parameter(name).detach().clone())
        for name in state.stacks:
            (count, *matrix), columns = model.get_parameter(name).shape, self.roundings.expert_columns[name]
            free = min(free_bytes(replica.device) for replica in self.replicas)
            size = expert_count(free // 4, max(matrix), columns, on_gpu=model.device.type != "cpu")
            for start in range(0, count, size):
                yield ExpertStep(layer, name, range(start, start + size), start + size >= count)

    def collect(self, step: RunnerStep) -> list[InputStatistics]:
        """Return the statistics of a step's inputs over all batches, on the first device.

        Each device sums one part of the batches at a time; the first device holds one such sum beside the total.
        """
        if isinstance(step, LinearStep):
            return self._sum_parts(partial(self._collect_linear, step)).statistics()
        pooled = self._state.pooled
        total = self._sum_parts(partial(self._collect_experts, step))
        if step.stack not in pooled:
            pooled[step.stack] = total.of_all()
        return total.statistics(pooled[step.stack])

    def apply(self, step: RunnerStep, weights: Iterable[NewWeight]) -> None:
        """Put a step's new weights into the model, on all devices.

        Experts reach the other devices with the last step of their stack: no input of the stack depends on them.
        """
        model = self.replica.model
        parameters = []
        for new in weights:
            if new.view is None:
                _set(model, new.parameter, new.weight)
                parameters.append(new.parameter)
            else:
                new.view(model.get_parameter(new.parameter).detach()).copy_(new.weight)
        if isinstance(step, ExpertStep) and step.is_last:
            parameters.append(step.stack)
        self.share(parameters)

    def share(self, parameters: Iterable[str]) -> None:
        """Copy the named parameters of the first device's model to the other devices."""
        for name in parameters:
            for replica in self.replicas[1:]:
                _set(replica.model, name, self.replica.model.get_parameter(name).detach().to(replica.device))

    def finish(self, layer: int, state: Callable[[], Any] = lambda: None) -> None:
        """Take all batches through a layer with its new weights, free it, and go on to the next layer.

        The states are committed with the value of ``state()`` now and then.
        """
        map_devices(partial(self._leave, layer), self._state.shares)
        del self._state
        super().finish(layer, state)

    def sample(
        self, layer: int, inputs: Sequence[str], outputs: Sequence[str], *, every_batch: bool
    ) -> dict[str, InputSample]:
        """Return samples of the inputs of modules ``inputs`` and the outputs of modules ``outputs``, by module.

        The modules are in layer number ``layer``. With ``every_batch`` all batches are run; otherwise a few, which are
        enough for rows. Modules that no token reaches have no sample, nor do inputs or the layer itself whose rows are
        not those of the hidden states.
        """
        rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name in (*inputs, *outputs)}
        few = -(-_SEQUENCES // self.batches[0].shape[0])
        step = 1 if every_batch else max(1, len(self.calls) // few)
        dealt = [[number for number in numbers if not number % step] for numbers in self.dealt]
        count, device = -(-_ROWS // sum(map(len, dealt))), self.replica.device
        aligned = (*inputs, self.layers[layer])

        def run_batches(share: tuple[Replica, Sequence[int]]) -> dict[str, torch.Tensor]:
            (replica, numbers), largest = share, dict[str, "torch.Tensor"]()
            number = 0

            def take(name: str, tensor: Any) -> None:
                tensor = tensor[0] if isinstance(tensor, tuple) else tensor
                flat = tensor.reshape(-1, tensor.shape[-1])
                if len(flat) != self.batches[number].numel() and name in aligned:
                    return  # several streams of hidden states, or an expert's tokens: no rows that lie beside others
                # Not every n-th: the first token of each sequence, which is like no other, would be among them.
                chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:count]
                rows[name][number] = flat[chosen.to(flat.device)].to(device)
                magnitudes = flat.abs().amax(dim=0).float()
                largest[name] = magnitudes.maximum(largest[name]) if name in largest else magnitudes

            with (
                following(replica.model, inputs, lambda name, args, kwargs, _: take(name, entering(args, kwargs))),
                following(replica.model, outputs, lambda name, _args, _kwargs, output: take(name, output)),
            ):
                for number in numbers:
                    self._run(layer, number, self._states(layer, number, replica)[0], replica)
            return {name: magnitudes.to(device) for name, magnitudes in largest.items()}

        by_device = map_devices(run_batches, list(zip(self.replicas, dealt, strict=True)))
        return {
            name: InputSample(
                torch.cat([by_batch[number] for number in sorted(by_batch)]),
                torch.stack([largest[name] for largest in by_device if name in largest]).amax(0),
            )
            for name, by_batch in rows.items()
            if by_batch
        }

    def _begin(self, layer: int) -> _LayerState:
        name, model = self.layers[layer], self.replica.model
        linear = {
            module: rounding for module, rounding in self.roundings.linear.items() if module.startswith(f"{name}.")
        }
        experts = stacks(model, name, self.roundings.experts)
        trace = self._trace(layer, linear) if self._reference and linear else LayerTrace([list(linear)])
        weights = [*(f"{module}.weight" for module in linear), *experts]
        leaving = sum(batch.numel() for batch in self.batches) * self.replica.walkable.width * model.dtype.itemsize
        spare = self.activations.spare(self.replica.device) - (leaving if self._reference else 0)
        room = max(0, spare) // len(self.replicas)
        shares = [
            _DeviceShare(
                replica,
                numbers,
                {weight: replica.model.get_parameter(weight) for weight in weights},
                TensorCache(trace, room),
            )
            for replica, numbers in zip(self.replicas, self.dealt, strict=True)
        ]
        return _LayerState(name, linear, experts, trace, shares)

    def _trace(self, layer: int, linear: Mapping[str, Rounding]) -> LayerTrace:
        """Return the trace of a layer's linear modules, recorded on the first layer of each kind."""
        name, model = self.layers[layer], self.replica.model
        kind = repr(model.get_submodule(name)), *(module.removeprefix(name) for module in linear)
        if kind not in self._traces:
            states, _ = self._states(layer, 0, self.replica)
            self._traces[kind] = name, trace_layer(model, name, linear, self.calls[0][layer], states)
        first, trace = self._traces[kind]
        return trace.renamed(first, name)

    def _sum_parts(self, collect: Callable[[_DeviceShare, Sequence[int]], _Collector]) -> _Collector:
        """Return the sum of ``collect(share, batch numbers)`` over all parts but those held out, on the first device.

        The sums of the parts are added in a fixed order.
        """
        shares, total = self._state.shares, None
        summed = self.parts[: self._summed]
        for first in range(0, len(summed), len(shares)):
            parts = summed[first : first + len(shares)]
            work = list(zip(shares, parts, strict=False))
            for part in map_devices(lambda pair: collect(*pair), work):
                if total is None:  # the first part is the first device's
                    total = part
                else:
                    total.join(part, self.replica.device)
                del part  # gigabytes, which the next parts need for their own
        assert total is not None  # noqa: S101 - there is a batch
        return total

    def _collect_linear(self, step: LinearStep, share: _DeviceShare, batches: Sequence[int]) -> StatisticsCollector:
        """Return the summed statistics of a linear step over ``batches``, on the device of ``share``.

        In the layer's last linear step the reference model runs the whole layer, and its states are set aside.
        """
        held_out = self._held_out[share.replica.device].__getitem__ if self._reference else None
        collector = StatisticsCollector(self._state.trace, step.modules, share.cache, held_out)
        model = share.replica.model
        for batch in batches:
            source, served = self._states(step.layer, batch, share.replica)
            if self._reference:
                with (
                    _weights(model, share.source_weights),
                    collector.reference_run(model, batch, source.hidden, complete=step.is_last),
                ):
                    output = self._run(step.layer, batch, source, share.replica)
                    if step.is_last:
                        self.activations.set_aside(batch, output, spill=bool(self._state.stacks))
            with collector.served_run(model, batch, served.hidden, self._state.linear):
                self._run(step.layer, batch, served, share.replica)
            collector.end_batch()
        return collector

    def _collect_experts(self, step: ExpertStep, share: _DeviceShare, batches: Sequence[int]) -> ExpertCollector:
        model = share.replica.model
        collector = ExpertCollector(step.stack, step.experts, pooled=step.stack not in self._state.pooled)
        for batch in batches:
            _, served = self._states(step.layer, batch, share.replica)
            linear = StatisticsCollector(self._state.trace, [], share.cache)  # rounds inputs alone
            with (
                linear.served_run(model, batch, served.hidden, self._state.linear),
                rounding_experts(model, self._state.stacks, self.roundings.experts, collector),
            ):
                self._run(step.layer, batch, served, share.replica)
        return collector

    def _set_reference_aside(self, layer: int, share: _DeviceShare) -> None:
        """Compute and set aside the reference model's states behind a layer, for batches that have none yet."""
        for batch in share.batches:
            if not self.activations.has_aside(batch):
                source, _ = self._states(layer, batch, share.replica)
                with _weights(share.replica.model, share.source_weights):
                    output = self._run(layer, batch, source, share.replica)
                self.activations.set_aside(batch, output, spill=True)

    def _leave(self, layer: int, share: _DeviceShare) -> None:
        """Take the batches of a device through a layer with its new weights, and store the states behind it."""
        model, state = share.replica.model, self._state
        for batch in share.batches:
            source, served = self._states(layer, batch, share.replica)
            linear = StatisticsCollector(state.trace, [], share.cache)  # rounds inputs alone
            with (
                linear.served_run(model, batch, served.hidden, state.linear),
                rounding_experts(model, state.stacks, self.roundings.experts),
            ):
                leaving = self._run(layer, batch, served, share.replica)
            if self._reference:
                reference = self.activations.take_aside(batch, share.replica.device)
                if reference is None:
                    with _weights(model, share.source_weights):
                        reference = self._run(layer, batch, source, share.replica)
                leaving = States.stacked([reference, leaving])
            self.activations.put(batch, leaving)
            with self._lock:
                self.advance(self.batches[batch].shape[0])

    def _states(self, layer: int, batch: int, replica: Replica) -> tuple[States, States]:
        """Return the states of ``batch`` that enter a layer: those of the reference and those of the served model."""
        states = self.activations.get(batch, replica.device)
        return (states[0], states[1]) if self._reference and layer else (states, states)

    def _run(self, layer: int, batch: int, states: States, replica: Replica) -> States:
        """Run a layer on the states of ``batch``, and return the states behind it."""
        module = replica.model.get_submodule(self.layers[layer])
        return self.calls[batch][layer].run(module, states, empty_cache(replica.model))


def held_out_rows(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the numbers of the rows, int64 [n], that each of the ``batches`` holds out: all rows of some tokens.

    ``batches`` are token ids. An eighth of the rows at most, and `_HELD_OUT` in all, are of tokens drawn with a fixed
    seed. Rows of other samples would not do: narrow texts repeat their tokens, and what was fitted to a token by heart
    fits it everywhere.
    """
    counts = torch.bincount(torch.cat([batch.flatten().cpu() for batch in batches]))
    tokens = counts.nonzero().flatten()
    room = min(_HELD_OUT, int(counts.sum()) // _HELD_OUT_SHARE)
    places: list[int] = []
    for place in torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0)).tolist():
        if (count := int(counts[tokens[place]])) <= room:
            places.append(place)
            room -= count
    chosen = tokens[places]
    return [torch.isin(batch.flatten().cpu(), chosen).nonzero().flatten() for batch in batches]


def stack_size(rows: int, columns: int) -> int:
    """Return how many matrices [rows, columns] with a Hessian each are rounded side by side on a GPU."""
    return max(1, _STACK // (4 * columns * max(rows, columns)))


def expert_count(room: int, rows: int, columns: int, *, on_gpu: bool) -> int:
    """Return the number of experts [rows, columns] whose Hessians are summed at a time in ``room`` bytes.

    They take at most `EXPERT_SUMS` bytes, on a GPU four times as many; there, whole stacks of `stack_size` are taken.
    """
    square, together = 4 * columns**2, stack_size(rows, columns) if on_gpu else 1
    count = max(1, min(room, EXPERT_SUMS * (4 if on_gpu else 1)) // square)
    return count // together * together or count


@contextmanager
def _weights(model: Any, weights: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, replace parameters of the model, by name, by ``weights``."""
    current = {name: model.get_parameter(name) for name in weights}
    for name, weight in weights.items():
        _set(model, name, weight)
    try:
        yield
    finally:
        for name, weight in current.items():
            _set(model, name, weight)


def _set(model: Any, name: str, weight: torch.Tensor) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, torch.nn.Parameter(weight, requires_grad=False))
