"""Layer mode with weights that change: each layer's Hessians, its new weights, and what those make of all batches.

Each batch goes through a layer twice: with the weights that are read, while X^T X of each linear input is summed, and
with those that were put in their place, whose hidden states enter the next layer. Inputs are rounded both times as they
will be when the model is served. So every layer sees what was lost before it. Memory is that of two layers, of the
hidden states, and of one layer's Hessians.

Beside the 16-bit model, whose hidden states run along, a layer gets its weights in turns: what reads the same input is
one, and the next turn's inputs are those that the last one's weights make. What the 16-bit model has more there is
summed too, with what its hidden states have more before a module adds to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from calibration.activations import Activations, last_commit
from calibration.calls import layer_names
from calibration.hooks import entering, following, hooked
from calibration.layers import Part, digest_of, walk
from calibration.lazy import torch
from calibration.measurement import Measurement, recording_cache
from calibration.observers import Observation
from calibration.replica import Replica
from calibration.weights import held

_ROWS = 1024  # of what is seen
_ALIKE = 0.02  # share of what a layer adds that may be lost to the rounding of 16-bit sums
Rounding = Callable[["torch.Tensor"], "torch.Tensor"]
"""What becomes of an input [..., I] when the model is served, in the dtype that it had."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What entered linear modules: the ``hessian`` X^T X, float32 [I, I], of ``tokens`` rows, of those ``modules``.

    Beside the 16-bit model whose inputs are Y: ``gap`` is X^T (Y - X), float32 [I, I], and ``owed``, of a module that
    adds to the hidden states, X^T (S - R), float32 [I, O], where S are the 16-bit model's without the module, and R
    these. Rows of such a module are divided by the size of the hidden states that it makes, which the next norm
    divides by.
    """

    modules: tuple[str, ...]
    hessian: torch.Tensor
    tokens: int
    gap: torch.Tensor | None = None
    owed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What was in a place: some ``rows`` of it, [n, I] in the model's dtype, and the ``largest`` magnitude of each
    channel over all tokens, float32 [I]."""

    rows: torch.Tensor
    largest: torch.Tensor


Look = Callable[[Sequence[str], Sequence[str]], Mapping[str, Seen]]
"""Takes modules whose inputs are to be seen, and others whose outputs are, and runs all batches through the layer."""
Fold = Callable[[int, Look], None]
"""Takes a layer by its number, and changes its weights so that it computes the same.

The roundings may be changed for it too."""
Solve = Callable[[int, Sequence[Inputs], bool], None]
"""Takes a layer by its number and what entered it, and puts weights in place of the model's own.

With the layer's last turn, what was made of it must be on the disk for good on return: it is not come back to."""


def run_sequential(
    replica: Replica,
    batches: Sequence[torch.Tensor],
    roundings: Mapping[str, Rounding],
    solve: Solve,
    activations: Activations,
    facts: Any,
    *,
    fold: Fold | None = None,
    beside: bool = False,
    advance: Callable[[int], None] = lambda _: None,
    commit_seconds: float = 60.0,
) -> None:
    """Give every layer new weights, going on at the last layer that an earlier attempt committed.

    Args:
        replica: the model with nothing loaded.
        batches: int64 token ids of [batch, sequence].
        roundings: of the inputs of the linear modules that get new weights, by the model's own names. Modules with the
            same input and the very same function have one Hessian.
        solve: see `Solve`.
        activations: where hidden states are kept.
        facts: plain values that must be the same for a run to be gone on with.
        fold: see `Fold`; called before anything of the layer is measured.
        beside: whether the 16-bit model runs along: then hidden states take twice the room.
        advance: told the number of samples after each batch of each layer, also of layers that were done before.
        commit_seconds: work after which the run is made resumable.

    Raises:
        CalibrationError: weights are missing, or the disk is full.
        NotReplayableError: the layers cannot be run one at a time.
    """
    layers = layer_names(replica.model, replica.attention.values())
    identity = digest_of([facts, sorted(replica.owned.items())], batches)
    start, *_ = last_commit(activations.folder, identity)
    part = _Part(replica, layers, range(len(batches)), beside=beside)

    def work(number: int) -> None:
        part.renew(number, roundings, fold, solve, activations, advance)

    walk([part], batches, activations, (start, identity), work, lambda: ({}, {}), advance, commit_seconds)


class _Part(Part):
    """All batches, on one device."""

    def __init__(self, replica: Replica, layers: list[str], numbers: Sequence[int], *, beside: bool) -> None:
        super().__init__(replica, layers, numbers)
        self._beside = beside

    def renew(
        self,
        layer: int,
        roundings: Mapping[str, Rounding],
        fold: Fold | None,
        solve: Solve,
        activations: Activations,
        advance: Callable[[int], None],
    ) -> None:
        """Give a layer its weights, and take all batches through it."""
        self.enter(layer)
        name = self.layers[layer]
        with torch.inference_mode():
            if fold is not None:
                fold(layer, lambda inputs, outputs: self._seen(layer, activations, inputs, outputs))
            linear = {each: how for each, how in roundings.items() if each.startswith(f"{name}.")}
            model = self.replica.model
            original = {each: model.get_submodule(each).weight for each in linear}
            turns, adding = self._turns(layer, activations, linear) if self._beside and linear else ([list(linear)], [])
            for turn in turns:
                sums = _Sums(turn, adding)
                for number in self.numbers:
                    first, served = self._states(layer, number, activations)
                    if self._beside:
                        with _weights(model, original), sums.watching_original(model, first):
                            self._run(layer, number, first)
                    with _rounding(model, linear, sums), sums.watching(model, served):
                        self._run(layer, number, served)
                    sums.end_batch()
                solve(layer, sums.found(), turn is turns[-1])
            sums = _Sums([], [])
            for number in self.numbers:
                first, served = self._states(layer, number, activations)
                with _rounding(model, linear, sums):
                    found = self._run(layer, number, served)
                sums.end_batch()
                if self._beside:
                    with _weights(model, original):
                        found = torch.stack([self._run(layer, number, first), found])
                activations.put(number, found)
                advance(served.shape[0])
        self.replica.weights.free(held(model, name))

    def _states(self, layer: int, number: int, activations: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """What enters the layer: the 16-bit model's hidden states and those of the model that is made."""
        hidden = activations.get(number, self.replica.device)
        return (hidden[0], hidden[1]) if self._beside and layer else (hidden, hidden)

    def _run(self, layer: int, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states that a layer makes; those that entered it where a hook has seen enough."""
        cache = recording_cache(Measurement(Observation()), self.replica.attention)
        try:
            return self.calls[number][layer].run(self.replica.model.get_submodule(self.layers[layer]), hidden, cache)
        except _Enough:
            return hidden

    def _turns(self, layer: int, activations: Activations, linear: Iterable[str]) -> tuple[list[list[str]], list[str]]:
        """Modules in the order in which their inputs are made, by turns, and those that add to the hidden states.

        Experts of a layer that do the same have the same turn. Modules that add are known by what the layer makes:
        what entered it and what they made, and no more.
        """
        model, number = self.replica.model, self.numbers[0]
        turns: dict[str, int] = {}
        last: list[Any] = [None]
        made: dict[str, torch.Tensor] = {}

        def see(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: torch.Tensor) -> None:
            came = entering(args, kwargs)
            if _kind(name) not in turns:
                same = last[0] is not None and came is last[0][0]
                turns[_kind(name)] = last[0][1] if same else len(set(turns.values()))
            last[0] = came, turns[_kind(name)]
            if found.shape == hidden.shape:
                made[name] = found

        hidden, _ = self._states(layer, number, activations)
        with following(model, linear, see):
            out = self._run(layer, number, hidden)
        count = len(set(turns.values()))
        by_turn = [[each for each in linear if turns.get(_kind(each)) == turn] for turn in range(count)]
        # One that reads an input with others (q of as many heads as k and v) makes something else of the same shape.
        alone = {name: found for name, found in made.items() if [name] in by_turn}
        rest = (out - sum(alone.values(), hidden)).float()
        adds = bool(alone) and float(rest.norm()) <= _ALIKE * float((out - hidden).float().norm())
        return by_turn, list(alone) if adds else []

    def _seen(
        self, layer: int, activations: Activations, inputs: Sequence[str], outputs: Sequence[str]
    ) -> dict[str, Seen]:
        rows: dict[str, list[torch.Tensor]] = {}
        largest: dict[str, torch.Tensor] = {}
        count = -(-_ROWS // len(self.numbers))

        def take(name: str, found: Any) -> None:
            found = found[0] if isinstance(found, tuple) else found
            flat = found.reshape(-1, found.shape[-1])
            # Not every n-th: the first token of each sequence, which is like no other, would be among them.
            chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:count]
            rows.setdefault(name, []).append(flat[chosen.to(flat.device)])
            here = flat.abs().amax(dim=0).float()
            largest[name] = here.maximum(largest[name]) if name in largest else here

        model = self.replica.model
        with (
            following(model, inputs, lambda name, args, kwargs, _: take(name, entering(args, kwargs))),
            following(model, outputs, lambda name, _args, _kwargs, found: take(name, found)),
        ):
            for number in self.numbers:
                self._run(layer, number, self._states(layer, number, activations)[0])
        return {name: Seen(torch.cat(parts), largest[name]) for name, parts in rows.items()}


class _Enough(Exception):  # noqa: N818 - nothing is wrong
    """All that was to be seen of a layer was seen."""


class _Sums:
    """X^T X by the first module that an input meets, of the modules of a turn, and what the 16-bit model has more."""

    def __init__(self, modules: Sequence[str], adding: Sequence[str]) -> None:
        self._modules, self._adding = frozenset(modules), frozenset(adding)
        self._found: dict[str, Inputs] = {}
        self._first: dict[str, str] = {}  # by module
        self._last: tuple[Any, Rounding, torch.Tensor, str] | None = None
        self._original: dict[str, torch.Tensor] = {}
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hidden: torch.Tensor | None = None  # what modules have added to, in the model that is made

    def take(self, name: str, entering: torch.Tensor, how: Rounding) -> torch.Tensor:
        """Round what enters a module, and count it once."""
        if self._last is None or self._last[0] is not entering or self._last[1] is not how:
            self._last = entering, how, how(entering), name
        rounded = self._last[2]
        if name in self._modules and self._first.setdefault(name, self._last[3]) == name:
            self._add(name, rounded.reshape(-1, rounded.shape[-1]))
        return rounded

    def _add(self, name: str, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        known = self._found.get(name)
        original, states = self._original.get(name), self._states.get(name)
        if known is None:
            square = rows.new_zeros(width, width, dtype=_float32())
            known = Inputs((name,), square, 0)
            if original is not None:
                known = replace(known, gap=square.clone())
            if states is not None:
                known = replace(known, owed=rows.new_zeros(width, states[0].shape[-1], dtype=_float32()))
        with _exact_in_tf32(rows):
            wide = rows.float()
            weight = wide.new_ones(()) if states is None else states[1].float().square().mean(-1, keepdim=True).rsqrt()
            scaled = wide if states is None else wide * weight
            known.hessian.addmm_(scaled.t(), scaled)
            # Tokens that another expert gets in the 16-bit model have no counterpart here.
            if known.gap is not None and original is not None and original.shape == rows.shape:
                known.gap.addmm_(scaled.t(), (original.float() - wide) * weight)
            if known.owed is not None and states is not None and self._hidden is not None:
                here = self._hidden.reshape(-1, self._hidden.shape[-1])
                known.owed.addmm_(scaled.t(), (states[0].float() - here.float()) * weight)
        self._found[name] = replace(known, tokens=known.tokens + len(rows))

    def watching_original(self, model: Any, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """See what enters the turn's modules in the 16-bit model, and the hidden states around those that add."""
        states = [hidden]

        def see(name: str, entering: torch.Tensor, found: torch.Tensor) -> None:
            if name in self._modules:
                self._original[name] = entering.reshape(-1, entering.shape[-1])
            if name in self._adding:
                states.append(states[-1] + found)
                if name in self._modules:
                    before, now = (each.reshape(-1, each.shape[-1]) for each in states[-2:])
                    self._states[name] = before, now

        return self._until_seen(model, see)

    def watching(self, model: Any, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """Follow what modules add to the hidden states of the model that is made."""
        self._hidden = hidden

        def see(name: str, _entering: torch.Tensor, found: torch.Tensor) -> None:
            if name in self._adding and self._hidden is not None:
                self._hidden = self._hidden + found

        return self._until_seen(model, see)

    def _until_seen(
        self, model: Any, see: Callable[[str, torch.Tensor, torch.Tensor], None]
    ) -> AbstractContextManager[None]:
        """Show what the turn's modules, and those that add, take and make, until all of the turn were seen."""
        waited = set(self._modules)

        def after(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: torch.Tensor) -> None:
            see(name, entering(args, kwargs), found)
            waited.discard(name)
            if not waited:
                raise _Enough

        return following(model, self._modules | self._adding, after)

    def end_batch(self) -> None:
        """Let go of what was seen of the batch."""
        self._last = self._hidden = None
        self._original.clear()
        self._states.clear()

    def found(self) -> list[Inputs]:
        """What was summed, in the order of the forward."""
        return [
            replace(one, modules=tuple(each for each, first in self._first.items() if first == name))
            for name, one in self._found.items()
        ]


def _kind(name: str) -> str:
    """A module's name without the number of its expert."""
    return re.sub(r"\.\d+\.", ".#.", name)


def _float32() -> torch.dtype:
    return torch.float32


@contextmanager
def _exact_in_tf32(rows: torch.Tensor) -> Iterator[None]:
    """Let a GPU multiply numbers of 16 bit in TF32, whose 11 bits of mantissa hold them, and add in float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or rows.element_size() == 2
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def _rounding(model: Any, roundings: Mapping[str, Rounding], sums: _Sums) -> Iterator[None]:
    def hook(name: str, how: Rounding) -> Any:
        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (sums.take(name, args[0], how), *args[1:]), kwargs
            return args, {**kwargs, "input": sums.take(name, kwargs["input"], how)}

        return before

    with hooked(
        model.get_submodule(name).register_forward_pre_hook(hook(name, how), with_kwargs=True)
        for name, how in roundings.items()
    ):
        yield


@contextmanager
def _weights(model: Any, original: Mapping[str, Any]) -> Iterator[None]:
    """Have modules their 16-bit weights for a while."""
    now = {name: model.get_submodule(name).weight for name in original}
    for name, weight in original.items():
        model.get_submodule(name).weight = weight
    try:
        yield
    finally:
        for name, weight in now.items():
            model.get_submodule(name).weight = weight
