"""Layer mode with weights that change: each layer's Hessians, its new weights, and what those make of all batches.

Each batch goes through a layer twice: with the weights that are read, while X^T X of each linear input is summed, and
with those that were put in their place, whose hidden states enter the next layer. Inputs are rounded both times as they
will be when the model is served. So every layer sees what was lost before it. Memory is that of two layers, of the
hidden states, and of one layer's Hessians.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.activations import STATE, Activations, committed_layers, state_file
from calibration.calls import layer_names
from calibration.layers import Clock, Part, digest_of
from calibration.measurement import Measurement, recording_cache
from calibration.observers import Observation
from calibration.replica import Replica
from calibration.weights import held

if TYPE_CHECKING:
    import torch

_ROWS = 1024  # of what is seen
Rounding = Callable[["torch.Tensor"], "torch.Tensor"]
"""What becomes of an input [..., I] when the model is served, in the dtype that it had."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What entered linear modules: the ``hessian`` X^T X, float32 [I, I], of ``tokens`` rows, of those ``modules``."""

    modules: tuple[str, ...]
    hessian: torch.Tensor
    tokens: int


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
Solve = Callable[[int, Sequence[Inputs]], None]
"""Takes a layer by its number and what entered it, and puts weights in place of the model's own.

What it made must be on the disk for good on return: the layer is not come back to."""


def run_sequential(
    replica: Replica,
    batches: Sequence[torch.Tensor],
    roundings: Mapping[str, Rounding],
    solve: Solve,
    activations: Activations,
    facts: Any,
    *,
    fold: Fold | None = None,
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
        advance: told the number of samples after each batch of each layer, also of layers that were done before.
        commit_seconds: work after which the run is made resumable.

    Raises:
        CalibrationError: weights are missing, or the disk is full.
        NotReplayableError: the layers cannot be run one at a time.
    """
    layers = layer_names(replica.model, replica.attention.values())
    identity = digest_of([facts, sorted(replica.owned.items())], batches)
    start = next((each for each in committed_layers(activations.folder) if _is_of(activations, each, identity)), 0)
    part, clock = _Part(replica, layers, range(len(batches))), Clock(commit_seconds)
    if start:
        activations.resume(start, len(batches))
    else:
        activations.start()
    try:
        part.record(batches, activations, keep=not start)
        if not start:
            activations.advance()
        advance(start * sum(batch.shape[0] for batch in batches))
        for number in range(start, len(layers)):
            part.renew(number, roundings, fold, solve, activations, advance)
            activations.advance()
            if number + 1 < len(layers) and clock.is_due():
                clock.run(lambda: activations.commit(lambda folder: _save(folder, identity)))
    finally:
        part.close()


def _save(folder: Path, identity: str) -> None:
    (folder / STATE).write_text(json.dumps({"identity": identity}), encoding="utf-8")


def _is_of(activations: Activations, layer: int, identity: str) -> bool:
    facts: Mapping[str, Any] = json.loads(state_file(activations.folder, layer).read_text(encoding="utf-8"))
    return bool(facts["identity"] == identity)


class _Part(Part):
    """All batches, on one device."""

    def renew(
        self,
        layer: int,
        roundings: Mapping[str, Rounding],
        fold: Fold | None,
        solve: Solve,
        activations: Activations,
        advance: Callable[[int], None],
    ) -> None:
        import torch

        module = self.enter(layer)
        name = self.layers[layer]
        if fold is not None:
            with torch.inference_mode():
                fold(layer, lambda inputs, outputs: self._seen(layer, module, activations, inputs, outputs))
        linear = {each: how for each, how in roundings.items() if each.startswith(f"{name}.")}
        sums = _Sums()
        with torch.inference_mode():
            with _rounding(self.replica.model, linear, sums):
                self._through(layer, module, activations, sums, keep=False)
            solve(layer, sums.found())
            sums.close()
            with _rounding(self.replica.model, linear, sums):
                self._through(layer, module, activations, sums, keep=True, advance=advance)
        self.replica.weights.free(held(self.replica.model, name))

    def _seen(
        self, layer: int, module: Any, activations: Activations, inputs: Sequence[str], outputs: Sequence[str]
    ) -> dict[str, Seen]:
        import torch

        rows: dict[str, list[torch.Tensor]] = {}
        largest: dict[str, torch.Tensor] = {}
        count = -(-_ROWS // len(self.numbers))

        def take(name: str, found: Any) -> None:
            found = found[0] if isinstance(found, tuple) else found
            flat = found.reshape(-1, found.shape[-1])
            rows.setdefault(name, []).append(flat[:: max(len(flat) // count, 1)].clone())
            here = flat.abs().amax(dim=0).float()
            largest[name] = here.maximum(largest[name]) if name in largest else here

        def before(name: str) -> Any:
            return lambda _, args, kwargs: take(name, args[0] if args else kwargs["input"])

        def after(name: str) -> Any:
            return lambda _module, _args, found: take(name, found)

        find = self.replica.model.get_submodule
        handles = [find(each).register_forward_pre_hook(before(each), with_kwargs=True) for each in inputs]
        handles += [find(each).register_forward_hook(after(each)) for each in outputs]
        try:
            self._through(layer, module, activations, _Sums(), keep=False)
        finally:
            for handle in handles:
                handle.remove()
        return {name: Seen(torch.cat(parts), largest[name]) for name, parts in rows.items()}

    def _through(
        self,
        layer: int,
        module: Any,
        activations: Activations,
        sums: _Sums,
        *,
        keep: bool,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        for number in self.numbers:
            hidden = activations.get(number, self.replica.device)
            cache = recording_cache(Measurement(Observation()), self.replica.attention)
            found = self.calls[number][layer].run(module, hidden, cache)
            sums.end_batch()
            if keep:
                activations.put(number, found)
                advance(hidden.shape[0])


class _Sums:
    """X^T X by the first module that an input meets; ``close`` ends the summing."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._first: dict[str, str] = {}  # by module
        self._last: tuple[Any, Rounding, torch.Tensor, str] | None = None
        self._open = True

    def take(self, name: str, entering: torch.Tensor, how: Rounding) -> torch.Tensor:
        """Round what enters a module, and count it once."""
        if self._last is None or self._last[0] is not entering or self._last[1] is not how:
            self._last = entering, how, how(entering), name
        rounded = self._last[2]
        if self._open and self._first.setdefault(name, self._last[3]) == name:
            self._add(name, rounded.reshape(-1, rounded.shape[-1]))
        return rounded

    def _add(self, name: str, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        known = self._sums.get(name)
        if known is None:
            known = self._sums[name] = rows.new_zeros(width, width, dtype=_float32())
        with _exact_in_tf32(rows):
            wide = rows.float()
            known.addmm_(wide.t(), wide)
        self._tokens[name] = self._tokens.get(name, 0) + len(rows)

    def end_batch(self) -> None:
        """Let go of the last input."""
        self._last = None

    def found(self) -> list[Inputs]:
        """What was summed, in the order of the forward."""
        return [
            Inputs(tuple(each for each, first in self._first.items() if first == name), total, self._tokens[name])
            for name, total in self._sums.items()
        ]

    def close(self) -> None:
        """Let go of the sums; what comes is rounded and not counted."""
        self._open = False
        self._sums.clear()


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@contextmanager
def _exact_in_tf32(rows: torch.Tensor) -> Iterator[None]:
    """Let a GPU multiply numbers of 16 bit in TF32, whose 11 bits of mantissa hold them, and add in float32."""
    import torch

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

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook(name, how), with_kwargs=True)
        for name, how in roundings.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
