"""X^T X of what enters linear modules, batch by batch, and what the 16-bit model has more there.

A layer's modules are taken in turns (`Way`), and a turn needs no more of a forward than what enters its modules: it
ends there. What one turn has run is not run again by the next ones while there is room (`KeptTensors`): a part of the
layer whose result is a linear module's, as attention's is that of `o_proj`, answers with what it made of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from quantmint.calibration.activations import States
from quantmint.calibration.hooks import entering, following, preceding
from quantmint.calibration.lazy import torch

_BLOCKS = 4  # of rows of X^T X: of each what lies left of the diagonal's block is not computed
Rounding = Callable[["torch.Tensor"], "torch.Tensor"]
"""What becomes of an input [..., I] when the model is served, in the dtype that it had."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of linear modules: the ``hessian`` X^T X, float32 [I, I], of ``tokens`` rows, of those ``modules``.

    Beside the 16-bit model whose inputs are Y: ``gap`` is X^T (Y - X), float32 [I, I]. A module of weight W that adds
    to the hidden states has ``owed`` in its place, X^T (S + Y W^T - R - X W^T), float32 [I, O], where S are the 16-bit
    model's without the module, and R these. Its rows are divided by the size of the hidden states that it makes, which
    the next norm divides by. ``pooled``: the hessian of an expert that few tokens reach is that of all experts of its
    layer.
    """

    modules: tuple[str, ...]
    hessian: torch.Tensor
    tokens: int
    gap: torch.Tensor | None = None
    owed: torch.Tensor | None = None
    pooled: bool = False

    @property
    def is_beside(self) -> bool:
        """Whether the 16-bit model ran along."""
        return self.gap is not None or self.owed is not None

    def lacking(self, weight: torch.Tensor) -> torch.Tensor | None:
        """X^T of what products with a weight [O, I] of the modules lack, float32 [I, O]; None beside nothing."""
        return self.owed if self.gap is None else self.gap @ weight.float().t()

    def on(self, device: str) -> Inputs:
        """The same on a device."""
        gap, owed = (None if each is None else each.to(device) for each in (self.gap, self.owed))
        return replace(self, hessian=self.hessian.to(device), gap=gap, owed=owed)

    def plus(self, other: Inputs) -> Inputs:
        """Return the sum with inputs of the same modules from other tokens; these tensors change in place."""
        for here, there in ((self.hessian, other.hessian), (self.gap, other.gap), (self.owed, other.owed)):
            if here is not None and there is not None:
                here.add_(there)
        return replace(self, tokens=self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Way:
    """The course of a forward through the linear modules of a layer.

    ``turns`` are modules in the order in which their inputs are made. What ``adding`` modules make is added to the
    hidden states. ``ends``: modules by whose result a larger part of the layer ends, with that part's name and how
    many times None it returns behind it (None where it returns no tuple).
    """

    turns: Sequence[Sequence[str]]
    adding: frozenset[str] = frozenset()
    ends: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)

    def of(self, old: str, new: str) -> Way:
        """The same through another layer of the kind."""

        def there(name: str) -> str:
            return new + name.removeprefix(old)

        return Way(
            [[there(name) for name in turn] for turn in self.turns],
            frozenset(map(there, self.adding)),
            {there(name): (there(part), rest) for name, (part, rest) in self.ends.items()},
        )


class Enough(Exception):  # noqa: N818 - nothing is wrong
    """All that was to be seen of a layer was seen."""


class KeptTensors:
    """Intermediate tensors of a batch within a layer, kept for reuse; at most ``room`` bytes in all."""

    def __init__(self, way: Way, room: int) -> None:
        self._way, self._room = way, room
        self._found: dict[tuple[int, bool, str], Any] = {}

    def put(self, number: int, original: bool, name: str, found: torch.Tensor | States) -> None:
        """Keep what enters a module that a part of the layer ends by, or what a part of it made."""
        if found.nbytes <= self._room:
            self._room -= found.nbytes
            self._found[number, original, name] = found

    def pop(self, number: int, original: bool, name: str) -> Any:
        """Return the kept tensor, None without one, and forget it."""
        found = self._found.pop((number, original, name), None)
        self._room += 0 if found is None else found.nbytes
        return found

    @contextmanager
    def answering(
        self, model: Any, number: int, original: bool, told: Callable[[str, torch.Tensor], None]
    ) -> Iterator[None]:
        """Have parts of the layer answer with what is kept; ``told`` of modules that they end by, and their results."""
        answering = []
        for name, (part, rest) in self._way.ends.items():
            entered = self.pop(number, original, name)
            if entered is not None:
                self.put(number, original, part, model.get_submodule(name).forward(entered))
            found = self._found.get((number, original, part))
            if found is None:
                continue

            def answer(
                *_: Any, name: str = name, found: torch.Tensor = found, rest: int | None = rest, **__: Any
            ) -> Any:
                told(name, found)
                return found if rest is None else (found, *[None] * rest)

            answering.append(model.get_submodule(part))
            answering[-1].forward = answer
        try:
            yield
        finally:
            for module in answering:
                del module.forward


class Sums:
    """X^T X by the first module that an input meets, of the modules of a turn, and what the 16-bit model has more."""

    def __init__(self, way: Way, modules: Sequence[str], kept: KeptTensors) -> None:
        self._way, self._modules, self._kept = way, frozenset(modules), kept
        self._found: dict[str, Inputs] = {}
        self._first: dict[str, str] = {}  # by module
        self._last: tuple[Any, Rounding, torch.Tensor, str] | None = None
        self._original: dict[str, torch.Tensor] = {}
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._hidden: torch.Tensor | None = None  # what modules have added to, in the model that is made

    @contextmanager
    def watching_original(self, model: Any, number: int, hidden: torch.Tensor, *, whole: bool) -> Iterator[None]:
        """See what enters the turn's modules in the 16-bit model, and the hidden states around those that add.

        The forward ends there, but for one that is to be ``whole``.
        """
        states, waited = [hidden], self._awaited()
        behind = self._modules & (self._way.adding | self._way.ends.keys())  # those whose results are wanted too

        def seen(name: str) -> None:
            waited.discard(name)
            if not waited and not whole:
                raise Enough

        def before(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            came = entering(args, kwargs)
            self._original[name] = came.reshape(-1, came.shape[-1])
            if name not in behind:
                seen(name)

        def added(name: str, found: torch.Tensor) -> None:
            if name in self._way.adding:
                states.append(states[-1] + found)
                if name in self._modules:
                    before, made, now = (each.reshape(-1, each.shape[-1]) for each in (states[-2], found, states[-1]))
                    self._states[name] = before, made, now

        def after(name: str, _args: Any, _kwargs: Any, found: torch.Tensor) -> None:
            added(name, found)
            if name in behind:
                if name in self._way.ends and not whole:
                    self._kept.put(number, True, self._way.ends[name][0], found)
                seen(name)

        with ExitStack() as stack:
            stack.enter_context(self._kept.answering(model, number, True, added))
            stack.enter_context(preceding(model, self._modules, before))
            stack.enter_context(following(model, self._way.adding | behind, after))
            yield

    @contextmanager
    def rounding(
        self, model: Any, number: int, hidden: torch.Tensor, roundings: Mapping[str, Rounding]
    ) -> Iterator[None]:
        """Round what enters modules, and count what enters those of the turn, where the forward ends."""
        self._hidden, waited = hidden, self._awaited()

        def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rounded = self._take(model, name, entering(args, kwargs), roundings[name])
            if name in self._modules:
                if name in self._way.ends:
                    self._kept.put(number, False, name, rounded)
                waited.discard(name)
                if not waited:
                    raise Enough
            return ((rounded, *args[1:]), kwargs) if args else (args, {**kwargs, "input": rounded})

        def added(name: str, found: torch.Tensor) -> None:
            if name in self._way.adding and self._hidden is not None:
                self._hidden = self._hidden + found

        with ExitStack() as stack:
            stack.enter_context(self._kept.answering(model, number, False, added))
            stack.enter_context(preceding(model, roundings, before))
            stack.enter_context(
                following(model, self._way.adding, lambda name, _args, _kwargs, made: added(name, made))
            )
            yield

    def _awaited(self) -> set[str]:
        """Modules that a forward goes on for: of those that read one input the first, once all were seen to."""
        return set(self._first.values() if len(self._first) == len(self._modules) else self._modules)

    def _take(self, model: Any, name: str, came: torch.Tensor, how: Rounding) -> torch.Tensor:
        """Return a module's input, rounded; an input of several modules is counted once."""
        if self._last is None or self._last[0] is not came or self._last[1] is not how:
            self._last = came, how, how(came), name
        rounded = self._last[2]
        if name in self._modules and self._first.setdefault(name, self._last[3]) == name:
            self._add(name, model.get_submodule(name), rounded.reshape(-1, rounded.shape[-1]))
        return rounded

    def _add(self, name: str, module: Any, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        known = self._found.get(name)
        original, states = self._original.get(name), self._states.get(name)
        if known is None:
            square = rows.new_zeros(width, width, dtype=torch.float32)
            known = Inputs((name,), square, 0)
            if states is not None:
                known = replace(known, owed=rows.new_zeros(width, states[0].shape[-1], dtype=torch.float32))
            elif original is not None:
                known = replace(known, gap=square.clone())
        kind = _multiplied(rows.dtype, rows.device)
        came = rows.to(kind)
        if known.owed is not None and states is not None and self._hidden is not None:
            before, made, now = states
            weight = now.float().square().mean(-1, keepdim=True).rsqrt().to(kind)
            here = self._hidden.reshape(-1, self._hidden.shape[-1])
            lost = (before.to(kind) - here.to(kind)).add_(made.to(kind) - module.forward(rows).to(kind))
            came = came * weight
            _add_product(known.owed, came, lost.mul_(weight))
        # Tokens that another expert gets in the 16-bit model have no counterpart here.
        elif known.gap is not None and original is not None and original.shape == rows.shape:
            _add_product(known.gap, came, original.to(kind) - came)
        _add_upper(known.hessian, came)
        self._found[name] = replace(known, tokens=known.tokens + len(rows))

    def end_batch(self) -> None:
        """Let go of what was seen of the batch."""
        self._last = self._hidden = None
        self._original.clear()
        self._states.clear()

    def join(self, other: Sums, device: str) -> None:
        """Take what was summed of other batches too, on a ``device``."""
        for name, one in other._found.items():
            there = one.on(device)
            self._found[name] = self._found[name].plus(there) if name in self._found else there
        self._first = other._first | self._first

    def found(self) -> list[Inputs]:
        """Return the sums in the order of the forward; nothing can be added afterwards."""
        for one in self._found.values():
            mirrored(one.hessian)
        return [
            replace(one, modules=tuple(each for each, first in self._first.items() if first == name))
            for name, one in self._found.items()
        ]


def add_square(square: torch.Tensor, rows: torch.Tensor) -> None:
    """Add X^T X of rows [tokens, I] to a float32 [I, I], above the diagonal alone: see `mirrored`."""
    _add_upper(square, rows.to(_multiplied(rows.dtype, rows.device)))


def mirrored(square: torch.Tensor) -> torch.Tensor:
    """The same with what lies above the diagonal below it too, in its place."""
    return square.triu_().add_(square.triu(1).t())


def _add_upper(square: torch.Tensor, rows: torch.Tensor) -> None:
    width = rows.shape[1]
    for first in range(0, width, step := -(-width // _BLOCKS)):
        _add_product(square[first : first + step, first:], rows[:, first : first + step], rows[:, first:])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add A^T B of [tokens, I] and [tokens, O], whose products are exact in float32, to a float32 [I, O]."""
    if left.dtype == torch.float32:
        total.addmm_(left.t(), right)
    else:
        total.add_(torch.mm(left.t(), right, out_dtype=torch.float32))


@cache
def _multiplied(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to multiply inputs in, for products in float32: their own 16 bits where the device sums those
    in float32, as a GPU does (with ROCm since PyTorch 2.10)."""
    if device.type == "cpu" or dtype == torch.float32:
        return torch.float32
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        summed = bool((torch.mm(ones, ones, out_dtype=torch.float32) == len(ones)).all())
    except RuntimeError:
        summed = False
    return dtype if summed else torch.float32
