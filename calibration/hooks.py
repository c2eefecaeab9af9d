"""Hooks on all linear modules and experts of a model, or of a part of it, for as long as it is measured.

Stacked experts are no modules that a hook could be put on: what multiplies a slice of their parameters is seen where
the product is computed, so that neither the gate's activation nor an architecture's arithmetic is written down here.
To count every token for every expert, the module is run again with a router's answer that sends all to one: its result
is dropped, and what the model goes on with is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from traceback import clear_frames
from typing import Any

from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.parts import hands_keys, trunk_of


def watch_stacked(
    name: str, module: Any, parameters: dict[str, torch.nn.Parameter], measurement: Measurement
) -> Iterator[Any]:
    """Put hooks on a module whose 3-D ``parameters`` stack experts, to measure their inputs; yield the handles."""
    stack = _Stack(name, parameters, measurement)

    def measured(*arguments: Any) -> AbstractContextManager[Any]:
        if not measurement.is_routed:
            return nullcontext()
        stack.show_every_token(module, arguments)
        return within_products(parameters, stack.see)

    yield from while_called(module, measured)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The experts of module ``name``, stacked in 3-D ``parameters`` [E, ., .]."""

    name: str
    parameters: dict[str, torch.nn.Parameter]
    measurement: Measurement

    @property
    def count(self) -> int:
        return next(iter(self.parameters.values())).shape[0]

    def see(self, entering: torch.Tensor, key: str, one: int | None) -> torch.Tensor:
        """Add the input of a product with a part of the stack to the measurement; return it (see `within_products`)."""
        for number, tokens in enumerate(entering) if one is None else ((one, entering),):
            expert = f"{self.name}.{number}"
            if one is None:  # an expert that gets all rows gets zeros for those that the router sent elsewhere
                tokens = tokens[(tokens != 0).any(dim=-1)]
            if self.measurement.is_routed and key == next(iter(self.parameters)):
                self.measurement.routed(expert, tokens.numel() // tokens.shape[-1])
            self.measurement.input(f"{self.name}.{key}.{number}", tokens, expert=expert)
        return entering

    def show_every_token(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """Run the experts for which the measurement wants every token on all tokens of the layer.

        Experts that are called in an unknown way are noted as ``routed_only``. ``arguments`` are those of the module's
        call.
        """
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        hidden, indices = tensors[0], [value for value in tensors[1:] if not value.is_floating_point()]
        names = [f"{self.name}.{number}" for number in range(self.count)]
        for name in names:
            self.measurement.routed(name, 0)
        scattered = len(arguments) == 1 and hidden.shape[0] % self.count == 0
        if not scattered and not (len(tensors) == 3 and len(indices) == 1):
            self.measurement.routed_only.update(names)
            return
        experts = [number for number, name in enumerate(names) if self.measurement.wants_every_token(name)]
        if not experts:
            return
        with self.measurement.every_token(), within_products(self.parameters, self.see):
            if scattered:
                self._scattered(module, hidden)
                return
            flat = hidden.reshape(-1, hidden.shape[-1])
            weights = next(value for value in tensors[1:] if value.is_floating_point())
            try:
                for number in experts:
                    index = indices[0].new_full((flat.shape[0], 1), number)
                    module(flat, index, weights.new_ones((flat.shape[0], 1)))
            except ValueError:  # a module that is not made for one expert a token, as LongCat's
                self.measurement.routed_only.update(names)

    def _scattered(self, module: Any, hidden: torch.Tensor) -> None:
        """Show all rows to every expert of a module that is called with [E * tokens, H].

        Such a module gets, for each expert, the expert's own rows scaled by their score and zeros for the rest. At most
        as many rows run at a time as in the model's own call.
        """
        rows = hidden[(hidden != 0).any(dim=-1)]
        step = max(hidden.shape[0] // self.count, 1)
        for start in range(0, rows.shape[0], step):
            module(rows[start : start + step].repeat(self.count, 1))


def stacked_part(parameters: Mapping[str, torch.nn.Parameter], weight: Any) -> tuple[str, int | None] | None:
    """Return the key of the 3-D parameter [E, ., .] that ``weight`` shares memory with, and the expert's number.

    The number is None for a whole parameter; the result is None for a tensor that is no part of any parameter.
    """
    if not isinstance(weight, torch.Tensor):
        return None
    for key, parameter in parameters.items():
        if weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
            whole = weight.ndim == 3 and weight.shape[0] == parameter.shape[0]
            offset = weight.storage_offset() - parameter.storage_offset()
            return key, None if whole else offset // parameter.stride(0)
    return None


def within_products(
    parameters: Mapping[str, torch.nn.Parameter], take: Callable[[torch.Tensor, str, int | None], torch.Tensor | None]
) -> AbstractContextManager[Any]:
    """Return a context in which ``take`` replaces the input of every product with a part of some 3-D ``parameters``.

    The parameters are [E, ., .]. ``take(input, key, expert)`` gets [tokens, I], or [E, tokens, I] with ``expert`` None
    for all experts at once, and returns the input to multiply. Where it returns None, the product is not computed, and
    zeros stand in its place.
    """

    def change(operands: dict[Any, Any], inputs: Any, weight: Any) -> bool:
        if (part := stacked_part(parameters, operands[weight])) is not None:
            changed = take(operands[inputs], *part)
            if changed is None:
                return False
            operands[inputs] = changed
        return True

    return _changing_products(change)


def widening_products(parameters: Mapping[str, torch.nn.Parameter]) -> AbstractContextManager[Any]:
    """Return a context in which products with a part of 3-D ``parameters`` convert that part to the input's dtype."""

    def change(operands: dict[Any, Any], inputs: Any, weight: Any) -> bool:
        if stacked_part(parameters, operands[weight]) is not None:
            operands[weight] = operands[weight].to(operands[inputs].dtype)
        return True

    return _changing_products(change)


def _changing_products(change: Callable[[dict[Any, Any], Any, Any], bool]) -> AbstractContextManager[Any]:
    """Return a context in which ``change`` may alter the operands of each matrix product before they are multiplied.

    ``change(operands, inputs, weight)`` gets a product's arguments by position or name, and the keys of its inputs and
    of its weight. It returns whether the product is wanted; zeros replace one that is not.
    """
    return _products()(change)


@cache
def _products() -> Callable[[Callable[[dict[Any, Any], Any, Any], bool]], AbstractContextManager[Any]]:
    """Return the `TorchFunctionMode` class that changes products; it is defined at the first call, once torch is used.

    One class is shared: a class of each use would hold on to the weights that its ``change`` knows until cycles are
    collected.
    """
    from torch.overrides import TorchFunctionMode

    first = {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
    first |= {torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm}
    second = {torch.addmm, torch.baddbmm}  # their first argument is what is added

    class Products(TorchFunctionMode):
        def __init__(self, change: Callable[[dict[Any, Any], Any, Any], bool]) -> None:
            super().__init__()
            self._change = change

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operands = {**dict(enumerate(args)), **(kwargs or {})}
            if func in first or func in second:
                inputs, weight = list(operands)[func in second :][:2]
                if not self._change(operands, inputs, weight):
                    rows, matrix = operands[inputs], operands[weight]
                    width = matrix.shape[0] if func is torch.nn.functional.linear else matrix.shape[-1]
                    return rows.new_zeros(*rows.shape[:-1], width)
            positional = [operands.pop(number) for number in range(len(args))]
            return func(*positional, **operands)

    return Products


def taking_inputs(module: Any, take: Callable[[str, int, torch.Tensor], torch.Tensor | None]) -> tuple[Any, Any]:
    """Replace the inputs of the experts that a module stacks: each multiplies what ``take`` returns for its input.

    ``take(key, expert, input)`` gets the parameter's name in the module, the expert's number and [tokens, I]. For None
    the product is zeros where experts are multiplied one by one; a product of all experts at once then uses the input
    itself. Return the handles of the hooks before and after the module's forward; removing both ends the replacement.
    """

    def round_inputs(entering: torch.Tensor, key: str, expert: int | None) -> torch.Tensor | None:
        if expert is not None:
            return take(key, expert, entering)
        pairs = [(rows, take(key, number, rows)) for number, rows in enumerate(entering)]
        return torch.stack([before if after is None else after for before, after in pairs])

    def within(*_: Any) -> AbstractContextManager[Any]:
        return within_products(
            {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}, round_inputs
        )

    return while_called(module, within)


def while_called(module: Any, context: Callable[..., AbstractContextManager[Any]]) -> tuple[Any, Any]:
    """Put hooks on a module that enter a context for the time of each call; return the hooks' two handles.

    ``context`` makes the context manager from the values of the call's arguments.
    """
    entered: list[AbstractContextManager[Any]] = []

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(context(*args, *kwargs.values()))
        entered[-1].__enter__()

    def after(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    return handle, module.register_forward_hook(after, always_call=True)


def watching(model: Any, part: str, measurement: Measurement) -> AbstractContextManager[None]:
    """Return a context in which the inputs of all linear modules and experts below ``part`` ("" for all) are measured.

    The output head is left out; attention modules are watched for their keys and values.
    """
    return hooked(_hooks(model, part, measurement))


@contextmanager
def watching_around(model: Any, layers: Sequence[str], before: Measurement, behind: Measurement) -> Iterator[None]:
    """Within the block, measure the inputs of linear modules outside the ``layers``, except the output head.

    Inputs of modules that run before the first layer are added to ``before``, those behind the last layer to
    ``behind``.
    """
    inside = tuple(f"{name}." for name in layers)
    places = {"before": before, "within": None, "behind": behind}
    at = ["before"]

    def move(place: str) -> Callable[..., None]:
        return lambda *_: at.__setitem__(0, place)

    def see(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        measurement = places[at[0]]
        if measurement is not None:
            measurement.input(name, entering(args, kwargs))

    head = model.get_output_embeddings()
    outside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not name.startswith(inside)
    ]
    first, last = model.get_submodule(layers[0]), model.get_submodule(layers[-1])
    handles = (
        trunk_of(model).register_forward_pre_hook(move("before")),
        first.register_forward_pre_hook(move("within")),
        last.register_forward_hook(move("behind")),
    )
    with hooked(handles), preceding(model, outside, see):
        yield


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Within the block, keep the hooks with these handles; remove them at its end."""
    there = list(handles)
    try:
        yield
    finally:
        for handle in there:
            handle.remove()


class EarlyStop:
    """End a model's forward as soon as all awaited modules have been called; what follows is not needed.

    >>> with EarlyStop({"self_attn.q_proj", "self_attn.k_proj"}) as stop:  # hooks call stop.reached(name)
    ...     layer(hidden)

    The block is left in its middle: PyTorch knows no other way out of a forward (`torch.utils.checkpoint` ends its
    recomputation likewise).
    """

    def __init__(self, awaited: Iterable[str]) -> None:
        self._awaited = set(awaited)

    def __enter__(self) -> EarlyStop:
        return self

    def reached(self, name: str) -> None:
        """Count a module as called; leave the block if it was the last one awaited."""
        self._awaited.discard(name)
        if not self._awaited:
            raise _ForwardEnded

    def __exit__(self, kind: type[BaseException] | None, ended: BaseException | None, trace: Any) -> bool:
        if kind is not _ForwardEnded or ended is None:
            return False
        clear_frames(trace)  # whose tensors, gigabytes, would wait for the garbage collector
        ended.__traceback__ = None
        return True


class _ForwardEnded(Exception):  # noqa: N818 - nothing is wrong, and `EarlyStop` alone sees it
    pass


@contextmanager
def substituted(model: Any, answers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, replace parts of a model, by name, by modules that call ``answers[name]`` with their arguments.

    Attributes, hooks and submodules of a replaced part are still found through its replacement.
    """
    originals = {name: model.get_submodule(name) for name in answers}
    for name, answer in answers.items():
        model.set_submodule(name, _stand_in_class()(originals[name], answer))
    try:
        yield
    finally:
        for name, original in originals.items():
            model.set_submodule(name, original)


_HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called")
"""Ends of the names under which PyTorch keeps a module's hooks."""


@cache
def _stand_in_class() -> Any:
    """Return the class of modules that stand in for others; it is defined at the first call, when torch is imported."""

    class StandIn(torch.nn.Module):
        def __init__(self, original: Any, answer: Callable[..., Any]) -> None:
            super().__init__()
            self.__dict__.update(_original=original, _answer=answer)  # not a submodule: it is only asked
            self.__dict__.update({name: value for name, value in vars(original).items() if name.endswith(_HOOKS)})

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._answer(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_original"], name)

    return StandIn


def following(model: Any, names: Iterable[str], see: Callable[..., None]) -> AbstractContextManager[None]:
    """Return a context in which ``see(name, args, kwargs, result)`` is called after each call of the named modules."""
    return hooked(
        model.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, made, name=name: see(name, args, kwargs, made), with_kwargs=True
        )
        for name in names
    )


def preceding(model: Any, names: Iterable[str], see: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context in which ``see(name, args, kwargs)`` is called before each call of the named modules.

    ``see`` may return other arguments as a pair (args, kwargs), or None.
    """
    return hooked(
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: see(name, args, kwargs), with_kwargs=True
        )
        for name in names
    )


def entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a module's call, whether positional or by name."""
    return next(iter((*args, *kwargs.values())))


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a linear module's call with ``tensor`` as its input."""
    return ((tensor, *args[1:]), kwargs) if args else (args, {**kwargs, "input": tensor})


def _hooks(model: Any, part: str, measurement: Measurement) -> Iterator[Any]:
    head = model.get_output_embeddings()
    for inner, module in (model.get_submodule(part) if part else model).named_modules():
        name = f"{part}.{inner}" if part and inner else part or inner
        if isinstance(module, torch.nn.Linear) and module is not head:
            yield module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: measurement.input(name, entering(args, kwargs)), with_kwargs=True
            )
        elif type(module).__name__.endswith("Experts"):
            stacked = {key: one for key, one in module.named_parameters(recurse=False) if one.ndim == 3}
            if stacked:
                yield from watch_stacked(name, module, stacked, measurement)
        elif hands_keys(module):
            yield from _watch_attention(name, module, measurement)


def _watch_attention(name: str, module: Any, measurement: Measurement) -> Iterator[Any]:
    """Put hooks on an attention module, and on ``kv_b_proj``, which reads its latent, if any; yield the handles."""
    reader = getattr(module, "kv_b_proj", None)
    rotary = 0 if reader is None else int(module.qk_rope_head_dim)
    yield from while_called(module, lambda *_: measurement.attending(name, rotary))
    if reader is not None:
        yield reader.register_forward_pre_hook(
            lambda _, args, kwargs: measurement.latent(name, entering(args, kwargs)), with_kwargs=True
        )
