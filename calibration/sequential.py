"""Layer mode with weights that change: each layer's Hessians, its new weights, and what those make of all batches.

Each batch goes through a layer twice: with the weights that are read, while X^T X of each linear input is summed
(`calibration.hessians`), and with those that were put in their place, whose hidden states enter the next layer. Inputs
are rounded both times as they will be when the model is served. So every layer sees what was lost before it. Memory is
that of two layers, of the hidden states, and of one layer's Hessians.

On several devices each takes its share of the batches through a layer of its own. The batches lie in a fixed number of
parts, each summed by itself; the first device adds the parts in their order, makes the weights and hands them to the
others. So the bytes are the same on however many devices of one kind.

Beside the 16-bit model, whose hidden states run along, a layer gets its weights in turns: what reads the same input is
one, and the next turn's inputs are those that the last one's weights make. What the 16-bit model has more there is
summed too, with what its hidden states have more before a module adds to them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from quantmint.calibration.activations import Activations, States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.experts import ExpertSums, rounding_experts, stacks
from quantmint.calibration.hessians import Enough, Inputs, KeptTensors, Rounding, Sums, Way
from quantmint.calibration.hooks import entering, following
from quantmint.calibration.layers import PARTS, Walk
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica
from quantmint.calibration.room import free_bytes

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
_Summed = TypeVar("_Summed", Sums, ExpertSums)
_ROWS = 1024  # of what is seen
_SAMPLES = 16  # that they are taken from
_ALIKE = 0.02  # share of what a layer adds that may be lost to the rounding of 16-bit sums


@dataclass(frozen=True, slots=True)
class InputSample:
    """A sample of a module's inputs: some ``rows``, [n, I] in the model's dtype, and the ``largest`` magnitude of each
    channel over all tokens that were run, float32 [I]."""

    rows: torch.Tensor
    largest: torch.Tensor


Look = Callable[[Sequence[str], Sequence[str], bool], Mapping[str, InputSample]]
"""Takes modules whose inputs are to be seen, others whose outputs are, and whether all batches are run for it: a few
are enough for rows."""
Fold = Callable[[int, Look], None]
"""Takes a layer by its number, and changes its weights so that it computes the same.

The roundings may be changed for it too."""
Solve = Callable[[int, Sequence[Inputs], bool], None]
"""Takes a layer by its number and what entered it, and puts weights in place of the model's own.

With the layer's last turn, what was made of it must be on the disk for good on return: it is not come back to."""


def run_sequential(
    replicas: Sequence[Replica],
    batches: Sequence[torch.Tensor],
    roundings: Mapping[str, Rounding],
    solve: Solve,
    activations: Activations,
    facts: Any,
    *,
    stacked: Mapping[str, Rounding] = MappingProxyType({}),
    fold: Fold | None = None,
    beside: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Give every layer new weights, going on at the last layer that an earlier attempt committed.

    ``replicas``, one a device and no more than batches, have nothing loaded; the first is the one that ``solve`` and
    ``fold`` change. ``batches`` are int64 token ids of [batch, sequence]. ``roundings`` are those of the inputs of the
    linear modules that get new weights, by the model's own names: modules with the same input and the very same
    function have one Hessian. ``stacked`` are those of stacked experts, by the parameter's name with the expert's
    number behind: these come last in a layer, each with a Hessian of its own. ``facts`` are plain values that must be
    the same for a run to be gone on with. ``fold`` is called before anything of the layer is measured. ``beside`` has
    the 16-bit model run along: then hidden states take twice the room. ``advance`` is told samples as by
    `calibration.layers.run_layers`.

    Raises `CalibrationError` where weights are missing or the disk is full, and `NotReplayableError` where the layers
    cannot be run one at a time.
    """
    facts = [facts, sorted(replicas[0].owned.items()), {"parts": PARTS}]
    given = replicas, batches, activations, facts, advance
    walk = _Sequential(*given, roundings=roundings, stacked=stacked, beside=beside)
    walk.through(lambda layer: walk.renew(layer, fold, solve))


@dataclass(frozen=True, slots=True)
class _BatchShare:
    """The batches of a device, by number, with the 16-bit weights of its layer, the way through that, and what is kept
    of batches there. ``parts`` are the same batches by the number of their part."""

    replica: Replica
    numbers: Sequence[int]
    parts: Mapping[int, Sequence[int]]
    original: Mapping[str, torch.Tensor]
    way: Way
    kept: KeptTensors


class _Sequential(Walk):
    def __init__(
        self, *given: Any, roundings: Mapping[str, Rounding], stacked: Mapping[str, Rounding], beside: bool
    ) -> None:
        super().__init__(*given)
        self._roundings, self._stacked, self._beside = roundings, stacked, beside
        self._ways: dict[tuple[str, ...], tuple[str, Way]] = {}
        self._lock = threading.Lock()

    def renew(self, layer: int, fold: Fold | None, solve: Solve) -> None:
        """Give a layer its weights, and take all batches through it."""
        self.enter(layer)
        name, model = self.layers[layer], self.replica.model
        with torch.inference_mode():
            if fold is not None:
                fold(layer, partial(self._seen, layer))
                self._hand_on(f"{name}.{each}" for each, _ in model.get_submodule(name).named_parameters())
            linear = {each: how for each, how in self._roundings.items() if each.startswith(f"{name}.")}
            experts = stacks(model, name, self._stacked)
            weights = [*(f"{one}.weight" for one in linear), *experts]
            way = self._way(layer, linear) if self._beside and linear else Way([list(linear)])
            room = self.activations.spare(self.replica.device) // len(self.replicas)
            shares = [
                _BatchShare(
                    one,
                    numbers,
                    dict(list(enumerate(self.parts))[turn :: len(self.replicas)]),
                    {each: one.model.get_parameter(each) for each in weights},
                    way,
                    KeptTensors(way, room),
                )
                for turn, (one, numbers) in enumerate(zip(self.replicas, self.dealt, strict=True))
            ]
            for turn in way.turns:
                last = turn is way.turns[-1]
                sums = partial(self._sums, layer=layer, linear=linear, turn=turn, whole=last)
                solve(layer, self._joined(sums, shares).found(), last and not experts)
                self._hand_on(f"{each}.weight" for each in turn)
            self._experts(layer, experts, linear, shares, solve)
            self._each(partial(self._leave, layer=layer, linear=linear, experts=experts), shares)
        self.leave(layer)

    def _sums(
        self, share: _BatchShare, *, layer: int, linear: Mapping[str, Rounding], turn: Sequence[str], whole: bool
    ) -> Sums:
        """Return the inputs of a turn's modules; the 16-bit model's layer is run as a ``whole`` once."""
        sums, one = Sums(share.way, turn, share.kept), share.replica
        for number in share.numbers:
            first, served = self._states(layer, number, one)
            if self._beside:
                watching = sums.watching_original(one.model, number, first.hidden, whole=whole)
                with _weights(one.model, share.original), watching:
                    leaving = self._run(layer, number, first, one)
                if whole:
                    share.kept.put(number, True, self.layers[layer], leaving)
            with sums.rounding(one.model, number, served.hidden, linear):
                self._run(layer, number, served, one)
            sums.end_batch()
        return sums

    def _leave(self, share: _BatchShare, *, layer: int, linear: Mapping[str, Rounding], experts: Sequence[str]) -> None:
        """Take batches through the layer with its new weights."""
        sums, one = Sums(share.way, [], share.kept), share.replica
        for number in share.numbers:
            first, served = self._states(layer, number, one)
            rounding = rounding_experts(one.model, experts, self._stacked)
            with sums.rounding(one.model, number, served.hidden, linear), rounding:
                leaving = self._run(layer, number, served, one)
            sums.end_batch()
            if self._beside:
                beside = share.kept.pop(number, True, self.layers[layer])
                if beside is None:
                    with _weights(one.model, share.original):
                        beside = self._run(layer, number, first, one)
                leaving = States.stacked([beside, leaving])
            self.activations.put(number, leaving)
            with self._lock:
                self.advance(self.batches[number].shape[0])

    def _experts(
        self,
        layer: int,
        experts: Sequence[str],
        linear: Mapping[str, Rounding],
        shares: Sequence[_BatchShare],
        solve: Solve,
    ) -> None:
        """Give the stacked experts of a layer their weights, whose other modules have theirs: a stack after the other.

        As many experts at a time as their sums fit in a quarter of the free memory.
        """
        model = self.replica.model
        for name in experts:  # a copy gets the new weights
            _set(model, name, model.get_parameter(name).detach().clone())

        def see(share: _BatchShare, name: str, numbers: range) -> ExpertSums:
            of_experts, one = ExpertSums(name, numbers), share.replica
            sums = Sums(share.way, [], share.kept)
            for number in share.numbers:
                _, served = self._states(layer, number, one)
                taking = rounding_experts(one.model, experts, self._stacked, of_experts.see)
                with sums.rounding(one.model, number, served.hidden, linear), taking:
                    self._run(layer, number, served, one)
                sums.end_batch()
            return of_experts

        for name in experts:
            # The columns are one of the last two dimensions; the larger sum is planned with.
            count, width = model.get_parameter(name).shape[0], max(model.get_parameter(name).shape[1:])
            step = max(1, min(count, min(free_bytes(one.device) for one in self.replicas) // (16 * width**2)))
            for start in range(0, count, step):
                found = self._joined(partial(see, name=name, numbers=range(start, start + step)), shares).found()
                solve(layer, found, name == experts[-1] and start + step >= count)
            self._hand_on([name])

    def _each(self, work: Callable[[_Given], _Found], shares: Sequence[_Given]) -> list[_Found]:
        """Have work done on all devices at a time."""
        if len(shares) == 1:  # in this thread, whose memory the C library gives back
            return [work(shares[0])]

        def there(share: _Given) -> _Found:
            with torch.inference_mode():  # is of a thread
                return work(share)

        with ThreadPoolExecutor(len(shares)) as pool:
            return list(pool.map(there, shares))

    def _joined(self, work: Callable[[_BatchShare], _Summed], shares: Sequence[_BatchShare]) -> _Summed:
        """Return the sums over all parts on the first device, added in the order of the parts.

        Each device sums one part after the other, and waits with its result until those before it are added: so one
        result more than the total is held on a device at a time.
        """
        totals: list[_Summed] = []
        added, failed = threading.Condition(), threading.Event()
        count = 0

        def add(part: int, sums: _Summed) -> bool:
            """Add what was summed over a part once all before it are added; return whether none of them failed."""
            nonlocal count
            with added:
                added.wait_for(lambda: count == part or failed.is_set())
                if failed.is_set():
                    return False
                if totals:
                    totals[0].join(sums, self.replica.device)
                else:  # the first part is the first device's
                    totals.append(sums)
                count += 1
                added.notify_all()
                return True

        def sum_parts(share: _BatchShare) -> None:
            try:
                for part, numbers in share.parts.items():
                    if not add(part, work(replace(share, numbers=numbers))):
                        return
            except BaseException:
                with added:
                    failed.set()
                    added.notify_all()
                raise

        self._each(sum_parts, shares)
        return totals[0]

    def _hand_on(self, names: Iterable[str]) -> None:
        """Have parameters of all devices those of the first."""
        for name in names:
            for one in self.replicas[1:]:
                _set(one.model, name, self.replica.model.get_parameter(name).detach().to(one.device))

    def _states(self, layer: int, number: int, one: Replica) -> tuple[States, States]:
        """Return the states that enter the layer: the 16-bit model's and those of the model that is made."""
        states = self.activations.get(number, one.device)
        return (states[0], states[1]) if self._beside and layer else (states, states)

    def _run(self, layer: int, number: int, states: States, one: Replica) -> States:
        """Return the states that a layer makes; those that entered it where a hook has seen enough."""
        try:
            return self.calls[number][layer].run(
                one.model.get_submodule(self.layers[layer]), states, empty_cache(one.model)
            )
        except Enough:
            return states

    def _way(self, layer: int, linear: Iterable[str]) -> Way:
        """Return the course of a forward through a layer's modules, recorded on the first layer of each kind.

        Experts of a layer that do the same have the same turn. Modules that add are known by what the layer makes:
        what entered it and what they made, and no more.
        """
        name, model, number = self.layers[layer], self.replica.model, 0
        kind = repr(model.get_submodule(name)), *(each.removeprefix(name) for each in linear)
        if kind in self._ways:
            other, way = self._ways[kind]
            return way.of(other, name)
        turns: dict[str, int] = {}
        last: list[Any] = [None]
        made: dict[str, torch.Tensor] = {}
        parts: dict[str, tuple[str, int | None]] = {}

        def see(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Any) -> None:
            if name not in linear:
                first, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, None)
                if rest is None or all(one is None for one in rest):
                    ended = [each for each, of in made.items() if of is first and each.startswith(f"{name}.")]
                    parts.update(dict.fromkeys(ended, (name, None if rest is None else len(rest))))
                return
            came = entering(args, kwargs)
            if _kind(name) not in turns:
                same = last[0] is not None and came is last[0][0]
                turns[_kind(name)] = last[0][1] if same else len(set(turns.values()))
            last[0] = came, turns[_kind(name)]
            if found.shape == hidden.shape:
                made[name] = found

        states, _ = self._states(layer, number, self.replica)
        hidden = states.hidden
        below = [f"{name}.{each}" for each, _ in model.get_submodule(name).named_modules() if each]
        with following(model, below, see):
            out = self._run(layer, number, states, self.replica).hidden
        count = len(set(turns.values()))
        by_turn = [[each for each in linear if turns.get(_kind(each)) == turn] for turn in range(count)]
        # One that reads an input with others (q of as many heads as k and v) makes something else of the same shape.
        alone = {name: found for name, found in made.items() if [name] in by_turn}
        rest = (out - sum(alone.values(), hidden)).float()
        adds = bool(alone) and float(rest.norm()) <= _ALIKE * float((out - hidden).float().norm())
        # A part that is not run again writes nothing for later layers.
        ends = {} if self.calls[number][layer].writes else {name: parts[name] for name in alone if name in parts}
        self._ways[kind] = name, Way(by_turn, frozenset(alone if adds else ()), ends)
        return self._ways[kind][1]

    def _seen(self, layer: int, inputs: Sequence[str], outputs: Sequence[str], whole: bool) -> dict[str, InputSample]:
        rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name in (*inputs, *outputs)}
        few = -(-_SAMPLES // self.batches[0].shape[0])
        step = 1 if whole else max(1, len(self.calls) // few)
        looked = [[number for number in numbers if not number % step] for numbers in self.dealt]
        count, device = -(-_ROWS // sum(map(len, looked))), self.replica.device

        def see(dealt: tuple[Replica, Sequence[int]]) -> dict[str, torch.Tensor]:
            (one, numbers), largest, tokens = dealt, dict[str, "torch.Tensor"](), 0

            def take(name: str, found: Any) -> None:
                found = found[0] if isinstance(found, tuple) else found
                flat = found.reshape(-1, found.shape[-1])
                if len(flat) != tokens and name in (*inputs, self.layers[layer]):
                    return  # several streams of hidden states, or an expert's tokens: rows would not lie beside others
                # Not every n-th: the first token of each sequence, which is like no other, would be among them.
                chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:count]
                rows[name][number] = flat[chosen.to(flat.device)].to(device)
                here = flat.abs().amax(dim=0).float()
                largest[name] = here.maximum(largest[name]) if name in largest else here

            with (
                following(one.model, inputs, lambda name, args, kwargs, _: take(name, entering(args, kwargs))),
                following(one.model, outputs, lambda name, _args, _kwargs, found: take(name, found)),
            ):
                for number in numbers:
                    tokens = self.batches[number].numel()
                    self._run(layer, number, self._states(layer, number, one)[0], one)
            return {name: found.to(device) for name, found in largest.items()}

        found = self._each(see, list(zip(self.replicas, looked, strict=True)))
        return {
            name: InputSample(
                torch.cat([of[number] for number in sorted(of)]),
                torch.stack([each[name] for each in found if name in each]).amax(0),
            )
            for name, of in rows.items()
            if of
        }


def _kind(name: str) -> str:
    """A module's name without the number of its expert."""
    return re.sub(r"\.\d+\.", ".#.", name)


@contextmanager
def _weights(model: Any, original: Mapping[str, Any]) -> Iterator[None]:
    """Have modules their 16-bit weights for a while."""
    now = {name: model.get_parameter(name) for name in original}
    for name, weight in original.items():
        _set(model, name, weight)
    try:
        yield
    finally:
        for name, weight in now.items():
            _set(model, name, weight)


def _set(model: Any, name: str, weight: torch.Tensor) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, torch.nn.Parameter(weight, requires_grad=False))
