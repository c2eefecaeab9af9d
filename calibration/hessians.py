"""Statistics of what enters linear modules, batch by batch: X^T X, and how a 16-bit reference model differs there.

A layer's modules are measured in steps (`LayerTrace`), and a step needs no more of a forward than what enters its
modules: it ends there. What one step has run is not run again by the next ones while there is room (`TensorCache`): a
sublayer whose result is a linear module's, as attention's is that of `o_proj`, answers with what it computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from quantmint.calibration.activations import States
from quantmint.calibration.hooks import EarlyStop, entering, following, preceding, substituted, with_input
from quantmint.calibration.inputs import InputRounder, Rounding
from quantmint.calibration.lazy import torch

_BLOCKS = 4  # of rows of X^T X, whose products take memory; what lies left of the diagonal's block need not be computed


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """Rows that are in no sum: ``inputs`` X [n, I], and ``gaps`` [n, I] or [n, O] as `InputStatistics` has them."""

    inputs: torch.Tensor
    gaps: torch.Tensor

    def to(self, device: str) -> HeldOutRows:
        """Return a copy whose tensors lie on ``device``."""
        return HeldOutRows(self.inputs.to(device), self.gaps.to(device))


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Statistics of the common input of linear ``modules``: ``hessian`` X^T X, float32 [I, I], over ``tokens`` rows.

    With a reference model, whose inputs are Y, ``input_gap`` is X^T (Y - X), float32 [I, I]. For a module of weight W
    that adds to the hidden states ``output_gap`` takes its place: X^T (S + Y W^T - R - X W^T), float32 [I, O], where S
    and R are the hidden states of the reference and of the served model before the module adds to them. The rows of
    such a module, in ``hessian`` too, are divided by the size of the reference model's hidden states after it, as the
    next norm does. ``pooled``: the Hessian is that of all experts of the layer, because few tokens reach this expert.
    ``held_out`` are rows of further tokens, which are in none of the sums; `add_held_out` adds them.
    """

    modules: tuple[str, ...]
    hessian: torch.Tensor
    tokens: int
    input_gap: torch.Tensor | None = None
    output_gap: torch.Tensor | None = None
    pooled: bool = False
    held_out: tuple[HeldOutRows, ...] = ()

    @property
    def has_reference(self) -> bool:
        """Return whether the statistics compare with a reference model."""
        return self.input_gap is not None or self.output_gap is not None

    def cross_term(self, weight: torch.Tensor) -> torch.Tensor:
        """Return X^T (T - X W^T), float32 [I, O], for a ``weight`` W [O, I] of the modules.

        The target T is the reference model's product; where the module adds to the hidden states, the difference of
        hidden states is included. Needs a reference model (`has_reference`).
        """
        if self.input_gap is not None:
            return self.input_gap @ weight.float().t()
        assert self.output_gap is not None, "statistics without a reference model"  # noqa: S101 - see `has_reference`
        return self.output_gap

    def held_out_inputs(self) -> torch.Tensor:
        """Return the held-out rows X, float32 [n, I]; n may be 0."""
        rows = [part.inputs.float() for part in self.held_out]
        return torch.cat(rows) if rows else self.hessian.new_empty(0, len(self.hessian))

    def held_out_errors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return T - X W^T of the held-out rows, float32 [n, O], as `cross_term` has it; n may be 0."""
        if not self.held_out:
            return self.hessian.new_empty(0, len(weight))
        gaps = torch.cat([part.gaps.float() for part in self.held_out])
        return gaps if self.input_gap is None else gaps @ weight.float().t()

    def add_held_out(self) -> InputStatistics:
        """Return the statistics with the held-out rows in the Hessian, in place, and no longer in `held_out`.

        The cross term stays that of the other rows.
        """
        for part in self.held_out:
            for rows, inputs in zip(self.hessian.chunk(_BLOCKS), part.inputs.chunk(_BLOCKS, 1), strict=True):
                _add_product(rows, inputs, part.inputs)
        return replace(self, held_out=())

    def to(self, device: str) -> InputStatistics:
        """Return a copy whose tensors lie on ``device``."""
        gaps = (None if gap is None else gap.to(device) for gap in (self.input_gap, self.output_gap))
        input_gap, output_gap = gaps
        held_out = tuple(part.to(device) for part in self.held_out)
        hessian = self.hessian.to(device)
        return replace(self, hessian=hessian, input_gap=input_gap, output_gap=output_gap, held_out=held_out)

    def plus(self, addend: InputStatistics) -> InputStatistics:
        """Return the sum with statistics of the same modules on more tokens; tensors of ``self`` change in place."""
        pairs = (
            (self.hessian, addend.hessian),
            (self.input_gap, addend.input_gap),
            (self.output_gap, addend.output_gap),
        )
        for total, tensor in pairs:
            if total is not None and tensor is not None:
                total.add_(tensor)
        return replace(self, tokens=self.tokens + addend.tokens, held_out=self.held_out + addend.held_out)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The order in which a forward runs the linear modules of a layer.

    ``steps`` are groups of modules in the order in which their inputs are computed. The outputs of ``residual`` modules
    are added to the hidden states. ``ends`` maps a module whose output is that of a whole sublayer to the sublayer's
    name and the number of None values that follow the output in the tuple it returns (None where it returns no tuple).
    """

    steps: Sequence[Sequence[str]]
    residual: frozenset[str] = frozenset()
    ends: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)

    def renamed(self, old: str, new: str) -> LayerTrace:
        """Return the trace of layer ``new`` from that of layer ``old``, which has the same structure."""

        def rename(name: str) -> str:
            return new + name.removeprefix(old)

        return LayerTrace(
            [[rename(name) for name in step] for step in self.steps],
            frozenset(map(rename, self.residual)),
            {rename(name): (rename(sublayer), count) for name, (sublayer, count) in self.ends.items()},
        )


class TensorCache:
    """Cache of intermediate tensors of a layer, by batch, model and module name, of at most ``room`` bytes in all."""

    def __init__(self, trace: LayerTrace, room: int) -> None:
        self._trace, self._room = trace, room
        self._tensors: dict[tuple[int, bool, str], Any] = {}

    def put(self, batch: int, reference: bool, name: str, tensor: torch.Tensor | States) -> None:
        """Store the input of a module that ends a sublayer, or a sublayer's output; do nothing if there is no room.

        ``reference`` says which model the tensor is of.
        """
        if tensor.nbytes <= self._room:
            self._room -= tensor.nbytes
            self._tensors[batch, reference, name] = tensor

    def pop(self, batch: int, reference: bool, name: str) -> Any:
        """Remove and return a tensor; None where it is not stored."""
        tensor = self._tensors.pop((batch, reference, name), None)
        self._room += 0 if tensor is None else tensor.nbytes
        return tensor

    def outputs(self, model: Any, batch: int, reference: bool) -> dict[str, torch.Tensor]:
        """Return the outputs of the sublayers that need not run again, keyed by the module that ends each sublayer.

        Where the input of such a module is stored, its output is computed from it first, with the module's current
        weight.
        """
        outputs: dict[str, torch.Tensor] = {}
        for name, (sublayer, _) in self._trace.ends.items():
            rows = self.pop(batch, reference, name)
            if rows is not None:
                self.put(batch, reference, sublayer, model.get_submodule(name).forward(rows))
            if (batch, reference, sublayer) in self._tensors:
                outputs[name] = self._tensors[batch, reference, sublayer]
        return outputs


class StatisticsCollector:
    """Sum the input statistics of the modules of one step over batches; an input that several modules read counts once.

    Each batch runs through the reference model (`reference_run`), where there is one, then through the served model
    (`served_run`), and ends with `end_batch`. Of modules that are compared with a reference model, rows that
    ``held_out(batch)`` numbers, on the rows' device, are kept apart from the sums.
    """

    def __init__(
        self,
        trace: LayerTrace,
        modules: Sequence[str],
        cached: TensorCache,
        held_out: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._trace, self._modules, self._cache = trace, frozenset(modules), cached
        self._held_out, self._batch = held_out, 0
        self._statistics: dict[str, InputStatistics] = {}  # by the first module that an input meets
        self._first: dict[str, str] = {}  # that module, by each module of the input
        self._rounder = InputRounder()
        self._reference_inputs: dict[str, torch.Tensor] = {}
        self._reference_states: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._hidden: torch.Tensor | None = None  # the served model's hidden states, as modules have added to them

    @contextmanager
    def reference_run(self, model: Any, batch: int, hidden: torch.Tensor, *, complete: bool) -> Iterator[None]:
        """Within the block, record the reference model's inputs of the step's modules, and hidden states around them.

        The forward, and with it the block, ends at the last of these modules, unless ``complete`` is set.
        """
        states = [hidden]
        outputs_too = self._modules & (self._trace.residual | self._trace.ends.keys())
        stop = EarlyStop(self._awaited())

        def reached(name: str) -> None:
            if not complete:
                stop.reached(name)

        def before(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensor = entering(args, kwargs)
            self._reference_inputs[name] = tensor.reshape(-1, tensor.shape[-1])
            if name not in outputs_too:
                reached(name)

        def added(name: str, output: torch.Tensor) -> None:
            if name in self._trace.residual:
                states.append(states[-1] + output)
                if name in self._modules:
                    before, by_module, after = (
                        tensor.reshape(-1, tensor.shape[-1]) for tensor in (states[-2], output, states[-1])
                    )
                    self._reference_states[name] = before, by_module, after

        def after(name: str, _args: Any, _kwargs: Any, output: torch.Tensor) -> None:
            added(name, output)
            if name in outputs_too:
                if name in self._trace.ends and not complete:
                    self._cache.put(batch, True, self._trace.ends[name][0], output)
                reached(name)

        with stop, ExitStack() as stack:
            stack.enter_context(self._cached_sublayers(model, batch, True, added))
            stack.enter_context(preceding(model, self._modules, before))
            stack.enter_context(following(model, self._trace.residual | outputs_too, after))
            yield

    @contextmanager
    def served_run(
        self, model: Any, batch: int, hidden: torch.Tensor, roundings: Mapping[str, Rounding]
    ) -> Iterator[None]:
        """Within the block, round the inputs of the modules in ``roundings``, and add up those of the step's modules.

        ``hidden`` are the hidden states that enter the layer. The forward, and with it the block, ends at the step's
        last module; without modules the layer runs to its end.
        """
        self._hidden, self._batch = hidden, batch
        stop = EarlyStop(self._awaited())

        def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rounded = self._take(model, name, entering(args, kwargs), roundings[name])
            if name in self._modules:
                if name in self._trace.ends:
                    self._cache.put(batch, False, name, rounded)
                stop.reached(name)
            return with_input(args, kwargs, rounded)

        def added(name: str, output: torch.Tensor) -> None:
            if name in self._trace.residual and self._hidden is not None:
                self._hidden = self._hidden + output

        with stop, ExitStack() as stack:
            stack.enter_context(self._cached_sublayers(model, batch, False, added))
            stack.enter_context(preceding(model, roundings, before))
            stack.enter_context(
                following(model, self._trace.residual, lambda name, _args, _kwargs, output: added(name, output))
            )
            yield

    @contextmanager
    def _cached_sublayers(
        self, model: Any, batch: int, reference: bool, added: Callable[[str, torch.Tensor], None]
    ) -> Iterator[None]:
        """Within the block, have sublayers whose output is cached return it.

        ``added(module, output)`` is called for the module that ends such a sublayer.
        """

        def answer(name: str, output: torch.Tensor, count: int | None, *_: Any, **__: Any) -> Any:
            added(name, output)
            return output if count is None else (output, *[None] * count)

        answers = {}
        for name, output in self._cache.outputs(model, batch, reference).items():
            sublayer, count = self._trace.ends[name]
            answers[sublayer] = partial(answer, name, output, count)
        with substituted(model, answers):
            yield

    def _awaited(self) -> frozenset[str]:
        """Return the modules that a forward must reach: the first reader of each input, if known, else all."""
        return frozenset(self._first.values()) if len(self._first) == len(self._modules) else self._modules

    def _take(self, model: Any, name: str, tensor: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """Return a module's rounded input; add it to the sums unless another module read the same input before."""
        rounded = self._rounder(tensor, rounding, name)
        if name in self._modules and self._first.setdefault(name, self._rounder.reader) == name:
            self._add(name, model.get_submodule(name), rounded.reshape(-1, rounded.shape[-1]))
        return rounded

    def _add(self, name: str, module: Any, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        statistics = self._statistics.get(name)
        original, states = self._reference_inputs.get(name), self._reference_states.get(name)
        if statistics is None:
            square = rows.new_zeros(width, width, dtype=torch.float32)
            statistics = InputStatistics((name,), square, 0)
            if states is not None:
                gap = rows.new_zeros(width, states[0].shape[-1], dtype=torch.float32)
                statistics = replace(statistics, output_gap=gap)
            elif original is not None:
                statistics = replace(statistics, input_gap=square.clone())
        dtype = _product_dtype(rows.dtype, rows.device)
        inputs, apart = rows.to(dtype), tuple[HeldOutRows, ...]()
        if statistics.output_gap is not None and states is not None and self._hidden is not None:
            before, by_module, after = states
            weight = after.float().square().mean(-1, keepdim=True).rsqrt()
            weight = weight.masked_fill(weight.isinf(), 0.0).to(dtype)  # a padding token's embedding may be zero
            hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
            lost = (before.to(dtype) - hidden.to(dtype)).add_(by_module.to(dtype) - module.forward(rows).to(dtype))
            inputs, apart = self._apart(inputs * weight, lost.mul_(weight))
            _add_product(statistics.output_gap, inputs, lost)
        # Tokens that another expert gets in the reference model have no counterpart here.
        elif statistics.input_gap is not None and original is not None and original.shape == rows.shape:
            lost = original.to(dtype) - inputs
            inputs, apart = self._apart(inputs, lost)
            _add_product(statistics.input_gap, inputs, lost)
        _add_upper(statistics.hessian, inputs)
        self._statistics[name] = replace(
            statistics, tokens=statistics.tokens + len(rows), held_out=statistics.held_out + apart
        )

    def _apart(self, inputs: torch.Tensor, gaps: torch.Tensor) -> tuple[torch.Tensor, tuple[HeldOutRows, ...]]:
        """Return ``inputs`` with zeros in the place of the batch's held-out rows, and these rows."""
        if self._held_out is None:
            return inputs, ()
        numbers = self._held_out(self._batch)
        return inputs.index_fill(0, numbers, 0.0), (HeldOutRows(inputs[numbers], gaps[numbers]),)

    def end_batch(self) -> None:
        """Free the tensors of the batch."""
        self._rounder.clear()
        self._hidden = None
        self._reference_inputs.clear()
        self._reference_states.clear()

    def join(self, addend: StatisticsCollector, device: str) -> None:
        """Add the sums of another collector, moved to ``device``."""
        for name, statistics in addend._statistics.items():
            there = statistics.to(device)
            self._statistics[name] = self._statistics[name].plus(there) if name in self._statistics else there
        self._first = addend._first | self._first

    def statistics(self) -> list[InputStatistics]:
        """Return the statistics in the order of the forward. Call it once, after the last batch."""
        for statistics in self._statistics.values():
            mirrored(statistics.hessian)
        return [
            replace(statistics, modules=tuple(module for module, first in self._first.items() if first == name))
            for name, statistics in self._statistics.items()
        ]


def add_square(square: torch.Tensor, rows: torch.Tensor) -> None:
    """Add X^T X of ``rows`` [tokens, I] to ``square``, float32 [I, I], in place.

    Only the part on and above the diagonal is complete afterwards; `mirrored` fills the rest.
    """
    _add_upper(square, rows.to(_product_dtype(rows.dtype, rows.device)))


def mirrored(square: torch.Tensor) -> torch.Tensor:
    """Copy the part above the diagonal of a square matrix to the part below it, in place; return the matrix."""
    return square.triu_().add_(square.triu(1).t())


def _add_upper(square: torch.Tensor, rows: torch.Tensor) -> None:
    width = rows.shape[1]
    for first in range(0, width, step := -(-width // _BLOCKS)):
        _add_product(square[first : first + step, first:], rows[:, first : first + step], rows[:, first:])


def _add_product(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add A^T B to ``total``, float32 [I, O], in place, for A [tokens, I] and B [tokens, O]; sums are in float32."""
    if first.dtype == torch.float32:
        total.addmm_(first.t(), second)
    elif _adds_in_place(first.dtype, first.device):
        torch.addmm(total, first.t(), second, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(first.t(), second, out_dtype=torch.float32))


@cache
def _adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a GPU adds products of 16 bit to a matrix in float32 without a product of its own beside it."""
    matrix, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
        return bool((total == 1 + len(matrix)).all())
    except (RuntimeError, TypeError):
        return False


@cache
def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to multiply inputs of ``dtype`` in, so that products are summed in float32.

    That is their own 16-bit dtype on a GPU that sums such products in float32 (with ROCm since PyTorch 2.10), else
    float32.
    """
    if device.type == "cpu" or dtype == torch.float32:
        return torch.float32
    matrix = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        summed = bool((torch.mm(matrix, matrix, out_dtype=torch.float32) == len(matrix)).all())
    except RuntimeError:
        summed = False
    return dtype if summed else torch.float32
