"""Record how a model calls its layers: all arguments but the hidden states, in one run of the embedding part.

The model's own forward prepares masks, position embeddings and other arguments; recorders stand in for its layers and
return the hidden states that they get. The next layer must be called with exactly what a layer returns: then the layers
can be run one at a time, each over all batches. What layers hand on beside hidden states is carried along: elements of
the tuple that a layer returns (the choice of a sparse indexer), and what it writes into a mapping that all layers get
(keys and values that later layers use again).
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantmint.calibration.activations import States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.errors import CalibrationError, NotReplayableError
from quantmint.calibration.hooks import substituted
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import layer_names, run_trunk, running

if TYPE_CHECKING:
    from quantmint.calibration.replica import Replica

_HIDDEN = object()
_CACHE = object()
_PLAIN = (type(None), bool, int, float, str)
_MAPPINGS = (dict, UserDict)
_LENGTHS = range(5)
"""Lengths of the tuples that layers return, 0 for layers that return hidden states alone."""
_TOKENS = 8
"""Length of the sequence that `loop_of` runs a model's embedding part on."""


@dataclass(frozen=True, slots=True)
class _Result:
    """Placeholder for an element of the tuple that the preceding layer returned, by its position."""

    position: int


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Placeholder for a mapping that layers may write into: its number in a forward, its class and its first items."""

    number: int
    kind: Callable[..., MutableMapping[Any, Any]]
    items: Mapping[Any, Any]


class _Arguments:
    """Arguments of a call, with ``states`` and ``cache`` in the place of placeholders.

    ``mappings`` are those that were made for the layer to write into, by number, and ``before`` their first items. A
    function that calls itself would keep the states until the garbage collector comes.
    """

    def __init__(self, states: States, cache: Any) -> None:
        self._states, self._cache = states, cache
        self.mappings: dict[int, MutableMapping[Any, Any]] = {}
        self.before: dict[int, Mapping[Any, Any]] = {}

    def filled(self, value: Any) -> Any:
        """Return an argument with its placeholders filled, and tensors on the device of the states."""
        if value is _HIDDEN:
            return self._states.hidden
        if value is _CACHE:
            return self._cache
        if isinstance(value, torch.Tensor):
            return value.to(self._states.hidden.device)
        if isinstance(value, tuple):
            return tuple(map(self.filled, value))
        if isinstance(value, _Result):
            return self._states.carried.get(_name("result", value.position))
        if isinstance(value, _Mapping):
            if value.number not in self.mappings:
                before = self.before[value.number] = {key: self.filled(item) for key, item in value.items.items()}
                self.mappings[value.number] = value.kind({**before, **_items(self._states.carried, value.number)})
            return self.mappings[value.number]
        return value


@dataclass(frozen=True, slots=True)
class Call:
    """Recorded arguments of one layer for one batch, with placeholders for hidden states, cache and carried values.

    ``length`` is the length of the tuple that the layer returns, 0 for hidden states alone. ``results`` are the
    positions of the tuple's elements that the next layer takes, ``mappings`` the numbers of the mappings that a later
    layer takes.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    length: int = 0
    results: frozenset[int] = frozenset()
    mappings: frozenset[int] = frozenset()

    def run(self, layer: Any, states: States, cache: Any) -> States:
        """Call the layer with ``states`` and ``cache`` in the placeholders, and return the states that leave it.

        Raises `NotReplayableError` if the layer does not return hidden states, or hands on anything but tensors, and
        `CalibrationError` if transformers cannot run it.
        """
        arguments = _Arguments(states, cache)
        args = arguments.filled(self.args)
        kwargs = {name: arguments.filled(value) for name, value in self.kwargs.items()}
        with running(f"a {type(layer).__name__}"):
            returned = layer(*args, **kwargs)
        hidden, *more = returned if isinstance(returned, tuple | list) else (returned,)
        if not isinstance(hidden, torch.Tensor):
            raise NotReplayableError(f"its layers return {type(hidden).__name__}, not hidden states")
        carried: dict[str, torch.Tensor] = {}
        for position in self.results:
            value = more[position - 1] if position <= len(more) else None
            if value is not None:
                carried[_name("result", position)] = _tensor(value)
        for number in self.mappings & arguments.mappings.keys():
            before = arguments.before[number]
            for key, value in arguments.mappings[number].items():
                if key not in before or value is not before[key]:
                    carried |= _flat(number, key, value)
        return States(hidden, carried)

    def returned(self, hidden: torch.Tensor) -> Any:
        """Return ``hidden`` in the form in which the layer returns it, with None for other elements of its tuple."""
        return (hidden, *[None] * (self.length - 1)) if self.length else hidden

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return a copy of the call with ``change`` applied to every recorded tensor."""

        def mapped(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return change(value)
            if isinstance(value, tuple):
                return tuple(map(mapped, value))
            if isinstance(value, _Mapping):
                return replace(value, items={key: mapped(item) for key, item in value.items.items()})
            return value

        return replace(
            self, args=mapped(self.args), kwargs={name: mapped(value) for name, value in self.kwargs.items()}
        )

    @property
    def writes(self) -> bool:
        """Return whether the layer may write into a mapping that a later layer reads."""
        return bool(self.mappings)


def _name(*path: Any) -> str:
    return json.dumps(path)


def _flat(number: int, key: Any, value: Any) -> dict[str, torch.Tensor]:
    """Return one item of mapping ``number``, a tensor or a tuple of tensors, as tensors by names that `_items` reads.

    Raises `NotReplayableError` for any other value.
    """
    if isinstance(key, int | str) and isinstance(value, tuple | list):
        return {_name("mapping", number, key, place): _tensor(each) for place, each in enumerate(value)}
    return {_name("mapping", number, key): _tensor(value)}


def _items(carried: Mapping[str, torch.Tensor], number: int) -> dict[Any, Any]:
    """Return the items of mapping ``number`` from ``carried`` tensors, which have the names that `_flat` gives."""
    found: dict[Any, Any] = {}
    for name, tensor in carried.items():
        kind, *path = json.loads(name)
        if kind == "mapping" and path[0] == number:
            found[path[1]] = (*found.get(path[1], ()), tensor) if len(path) == 3 else tensor
    return found


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise NotReplayableError(f"its layers hand on {type(value).__name__}, which is no tensor")
    return value


@dataclass(frozen=True, slots=True)
class Loop:
    """Names of a model's ``layers`` in order, and the form of their results.

    ``length`` is the length of the tuple that a layer returns, 0 for hidden states alone; ``width`` is the number of
    values in the hidden states of one token.
    """

    layers: tuple[str, ...]
    length: int
    width: int


def replay_obstacle(model: Any) -> str | None:
    """Return why a model's layers cannot be run one at a time, as part of a sentence; None if they can.

    All tensors of the model must be on one device; on the meta device this takes milliseconds, because only the
    embedding part is run.
    """
    try:
        loop_of(model)
    except NotReplayableError as error:
        return str(error)
    return None


def skipped_layers(model: Any) -> tuple[str, ...]:
    """Return the names of the layers that a model does not run on text alone; none if that cannot be told.

    As for `replay_obstacle`, all tensors of the model must be on one device, which may be meta.
    """
    try:
        loop_of(model)
    except NotReplayableError as error:
        return error.skipped
    return ()


def loop_of(model: Any) -> Loop:
    """Return the names of a model's layers and the form of their results, found by runs of the embedding part.

    Raises `NotReplayableError` where the layers cannot be run one at a time; the message is that of `replay_obstacle`.
    """
    layers = layer_names(model)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device=next(model.parameters()).device)
    reasons: list[NotReplayableError] = []
    for length in _LENGTHS:
        run = _LayerRun(model, layers, length, {})
        try:
            with torch.inference_mode(), _answering_no():
                states, _ = run.play(tokens)
            return Loop(tuple(layers), length, states.hidden.numel() // _TOKENS)
        except NotReplayableError as error:
            reasons.append(error)
        except CalibrationError as error:
            # The layers return a tuple of another length, or the model needs more than text.
            reasons.append(NotReplayableError(str(error)))
    raise reasons[0]


def _answering_no() -> Any:
    """Return a dispatch mode in which tensors on the meta device, which hold no numbers, read as 0, False or empty.

    Forwards ask, for instance, whether a position exceeds a length that was seen before.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    # The last of them are made of the first, but stay whole in inference mode.
    numbers = (aten._local_scalar_dense.default, aten.equal.default, aten.item.default, aten.is_nonzero.default)

    class Answering(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in numbers and args[0].is_meta:
                return torch.zeros((), dtype=args[0].dtype).item()
            if func is aten.nonzero.default and args[0].is_meta:
                return args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
            return func(*args, **(kwargs or {}))

    return Answering()  # type: ignore[no-untyped-call]


def record(replica: Replica, batches: Iterable[torch.Tensor]) -> Iterator[tuple[States, list[Call]]]:
    """Yield, for each batch of token ids, the states that enter the first layer and the call of every layer.

    Raises `NotReplayableError` where the model does more between its layers than to hand on what they return.
    """
    pool: _Pool = {}
    loop = replica.walkable
    for batch in batches:
        with torch.inference_mode():
            tape = _LayerRun(replica.model, loop.layers, loop.length, pool).play(batch.to(replica.device))
        yield tape


def answering(model: Any, layers: Iterable[str], answer: Any) -> AbstractContextManager[None]:
    """Within the block, have the named layers return ``answer`` and compute nothing."""
    return substituted(model, dict.fromkeys(layers, lambda *_, **__: answer))


_Pool = dict[tuple[int, "torch.dtype", "torch.Size"], "torch.Tensor"]
"""Tensors of calls by the order in which a batch meets them, with their types and shapes: masks of all layers of a kind
and of all batches are the same, and so are position embeddings."""


class _LayerRun:
    """One run of a model in which recorders replace its layers and return the hidden states that they get.

    With ``length`` above 0 they return tuples of that length that begin with the hidden states. ``pool`` holds tensors
    of earlier batches, so that equal ones are stored once.
    """

    def __init__(self, model: Any, layers: Sequence[str], length: int, pool: _Pool) -> None:
        self._model, self._layers, self._length, self._pool = model, layers, length, pool
        self.calls: list[Call] = []
        self._cache = empty_cache(model)
        self._skipped: list[str] = []
        self._first: list[torch.Tensor] = []
        self._handed: list[torch.Tensor] = []
        self._results: list[_Result] = []
        self._mappings: list[Any] = []
        self._same: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def play(self, batch: torch.Tensor) -> tuple[States, list[Call]]:
        """Run the model on a batch; return the states that enter the first layer, and the call of every layer.

        Raises `NotReplayableError` where the model skips layers on text alone.
        """
        recorders = {name: self._recorder(number) for number, name in enumerate(self._layers)}
        with substituted(self._model, recorders):
            run_trunk(self._model, batch, self._cache)
        behind = self._layers[self._position :]
        if self._skipped:
            number = self._layers.index(self._skipped[0])
            raise NotReplayableError(f"it skips layer {number} on text alone", (*self._skipped, *behind))
        if behind:
            raise NotReplayableError(f"it ran {len(self.calls)} of its {len(self._layers)} layers", behind)
        return States(self._first[0]), self._linked()

    @property
    def _position(self) -> int:
        """Return the number of the layer that is expected next."""
        return len(self.calls) + len(self._skipped)

    def _recorder(self, number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = next(iter((*args, *kwargs.values())), None)
            if "hidden_states" in kwargs:
                hidden = kwargs["hidden_states"]
            untouched = not self._handed or hidden is self._handed[-1]
            # Layers are recorded behind a skipped one as well, so that all that are skipped can be named.
            self._skipped += self._layers[self._position : number]
            if not isinstance(hidden, torch.Tensor) or number != self._position or not untouched:
                raise NotReplayableError("it does more between its layers than to hand on hidden states")
            if not self._first:
                self._first.append(hidden)
            places = {name: self._place(value) for name, value in kwargs.items()}
            self.calls.append(Call(tuple(map(self._place, args)), places, self._length))
            # New objects each time: those of an earlier layer must not pass for this one's.
            self._handed.append(hidden.view_as(hidden))
            self._results = [_Result(position) for position in range(1, self._length)]
            return (self._handed[-1], *self._results) if self._length else self._handed[-1]

        return forward

    def _place(self, value: Any) -> Any:
        """Return an argument as a call stores it, with placeholders for what differs when the call is run.

        Raises `NotReplayableError` for an object that layers may change.
        """
        if value is self._cache:
            return _CACHE
        if isinstance(value, torch.Tensor):
            latest = self._handed[-1] if self._handed else self._first[0]
            return _HIDDEN if value is latest else self._pooled(value)
        if isinstance(value, tuple):
            return tuple(map(self._place, value))
        if isinstance(value, _Result) and any(value is result for result in self._results):
            return value
        if type(value) in _MAPPINGS:
            return self._mapping(value)
        if not isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
            raise NotReplayableError(f"its layers are called with {type(value).__name__}, which they may change")
        return value

    def _mapping(self, value: MutableMapping[Any, Any]) -> _Mapping:
        number = next((place for place, known in enumerate(self._mappings) if known is value), len(self._mappings))
        if number == len(self._mappings):
            self._mappings.append(value)
        return _Mapping(number, type(value), {key: self._place(item) for key, item in value.items()})

    def _pooled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that an earlier batch had in this place if it is equal, else ``tensor``, copied to the
        host.

        A tensor that is the first in its place stays where it is.
        """
        if id(tensor) not in self._same:
            # The tensor itself is kept as well, so that no other tensor gets its id.
            key = len(self._same), tensor.dtype, tensor.shape
            known = self._pool.setdefault(key, tensor)
            apart = known is not tensor and not torch.equal(known, tensor)
            self._same[id(tensor)] = tensor, tensor.cpu() if apart and not tensor.is_meta else known
        return self._same[id(tensor)][1]

    def _linked(self) -> list[Call]:
        """Return the recorded calls in order, each with the results and mappings that later layers take from it."""
        found: list[Call] = []
        results, mappings = frozenset[int](), frozenset[int]()
        for call in reversed(self.calls):
            found.append(replace(call, results=results, mappings=mappings))
            places = list(_places((call.args, tuple(call.kwargs.values()))))
            results = frozenset(place.position for place in places if isinstance(place, _Result))
            mappings |= {place.number for place in places if isinstance(place, _Mapping)}
        return found[::-1]


def _places(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for each in value:
            yield from _places(each)
    else:
        yield value
