"""Folds: changes of a model that leave its function the same and make it easier to quantize, at no cost when it runs.

    anatomies, left = study(one, layers, tokens)                             # see `anatomy`
    outside = require_turnable(one, layers, anatomies, tokens, stored)
    turned = replace(one, weights=Turned(one, anatomies, outside))  # what it loads is turned

Rotation: the residual stream is turned by blocks of 32, the groups of an MX scale, with signs and a Hadamard matrix
(R1), and so is each head's value (R2): an outlier is spread over its own group and over no other (arXiv 2511.04214
says why one matrix for all channels does harm). What writes the stream is turned, what reads it turned back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibration.replica import Replica
from calibration.weights import Weights
from pipeline.quantize.engines.stream.kernels import MX_GROUP

if TYPE_CHECKING:
    import torch

Change = Callable[["torch.Tensor"], "torch.Tensor"]
"""Something that is done along the last dimension of a tensor in float32."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [..., O, I], or [..., I, O] where ``transposed``, and its bias [O], by their names below a layer."""

    weight: str
    bias: str | None = None
    transposed: bool = False

    def inputs(self, root: Any, how: Change) -> None:
        """Change it along its inputs."""
        change(root, self.weight, (lambda w: how(w.mT).mT) if self.transposed else how)

    def outputs(self, root: Any, how: Change) -> None:
        """Change it along its outputs."""
        change(root, self.weight, how if self.transposed else lambda w: how(w.mT).mT)
        if self.bias is not None:
            change(root, self.bias, how)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that multiplies by its weight plus ``offset``, and what reads it."""

    weight: str
    offset: float
    width: int
    readers: tuple[Matrix, ...]

    def gain(self, root: Any) -> torch.Tensor:
        """What it multiplies by, float32."""
        found: torch.Tensor = root.get_parameter(self.weight).detach().float() + self.offset
        return found

    def count(self, _root: Any) -> int:
        """How many factors it can be scaled by."""
        return self.width

    def spread(self, factors: torch.Tensor) -> torch.Tensor:
        """Factors of its outputs for the inputs of what reads it."""
        return factors

    def scale(self, root: Any, factors: torch.Tensor) -> None:
        """Divide its output by ``factors``, and multiply them into what reads it."""
        change(root, self.weight, lambda w: (w + self.offset) / factors - self.offset)
        for reader in self.readers:
            reader.inputs(root, lambda w: w * factors)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two matrices between which each channel is on its own: ``first``'s outputs, and ``second``'s inputs.

    ``beside`` has the same outputs and may be put in another order, but not multiplied. Each of ``repeats`` runs of
    ``width`` outputs follows another in the inputs: heads of a value that several queries share.
    """

    first: Matrix
    second: Matrix
    beside: Matrix | None
    width: int
    repeats: int

    def count(self, root: Any) -> int:
        """How many factors it can be scaled by."""
        return len(root.get_parameter(self.first.weight))

    def spread(self, factors: torch.Tensor) -> torch.Tensor:
        """Factors of the outputs for the inputs."""
        runs = factors.view(-1, 1, self.width).expand(-1, self.repeats, -1)
        return runs.reshape(-1)

    def scale(self, root: Any, factors: torch.Tensor) -> None:
        """Divide the channels by ``factors``, and multiply them into what reads them."""
        self.first.outputs(root, lambda w: w / factors)
        self.second.inputs(root, lambda w: w * self.spread(factors))

    def arrange(self, root: Any, order: torch.Tensor) -> None:
        """Put the channels in an order, int64 [I]."""
        for matrix in (self.first, self.beside):
            if matrix is not None:
                matrix.outputs(root, lambda w: w[..., order])
        self.second.inputs(root, lambda w: w[..., order])

    def turn(self, root: Any, turn: Change) -> None:
        """Turn the channels by an orthogonal matrix within each head."""
        self.first.outputs(root, turn)
        self.second.inputs(root, turn)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a layer is made of: its norms, what writes the residual stream, and its pairs."""

    width: int
    norms: tuple[Norm, ...]
    writers: tuple[Matrix, ...]
    value: Pair | None
    inner: tuple[Pair, ...]
    unturnable: str | None = None

    def turn(self, root: Any, turn: Change, heads: Change) -> None:
        """Turn the residual stream, of whose width ``turn`` is, and the heads of the value."""
        for norm in self.norms:
            if norm.width == self.width:
                gain = norm.gain(root)
                for reader in norm.readers:
                    reader.inputs(root, lambda w, gain=gain: turn(w * gain))  # type: ignore[misc]
                change(root, norm.weight, lambda w, norm=norm: w.fill_(1 - norm.offset))  # type: ignore[misc]
        for writer in self.writers:
            writer.outputs(root, turn)
        if self.value is not None and not self.value.width % MX_GROUP:
            self.value.turn(root, heads)

    @property
    def touched(self) -> set[str]:
        """Names of all parameters that a fold may change."""
        matrices = [reader for norm in self.norms for reader in norm.readers] + list(self.writers)
        pairs = [*self.inner, *([self.value] if self.value else [])]
        matrices += [each for pair in pairs for each in (pair.first, pair.second, pair.beside) if each is not None]
        names = {norm.weight for norm in self.norms} | {matrix.weight for matrix in matrices}
        return names | {matrix.bias for matrix in matrices if matrix.bias is not None}


def hadamard(signs: torch.Tensor | None = None) -> Change:
    """Multiply by signs, then each block of 32 by a Hadamard matrix over sqrt(32): orthogonal."""
    import torch

    block = torch.ones(1, 1)
    while len(block) < MX_GROUP:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block /= math.sqrt(MX_GROUP)

    def turn(numbers: torch.Tensor) -> torch.Tensor:
        signed = numbers if signs is None else numbers * signs.to(numbers.device)
        return (signed.reshape(-1, MX_GROUP) @ block.to(numbers.device, numbers.dtype)).view(numbers.shape)

    return turn


def signs(width: int) -> torch.Tensor:
    """Signs of a width: always the same ones, float32."""
    import torch

    return torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)).mul(2.0).sub(1.0)


def change(root: Any, name: str, how: Change) -> None:
    """Put another parameter in the place of one, computed in float32 and rounded to its dtype."""
    import torch

    path, _, last = name.rpartition(".")
    old = root.get_parameter(name).detach()
    new = how(old.float()).to(old.dtype).contiguous()
    setattr(root.get_submodule(path), last, torch.nn.Parameter(new, requires_grad=False))


@dataclass(frozen=True, slots=True)
class Outside:
    """What lies before and behind the layers, by the model's own names."""

    embedding: str
    norm: Norm

    def turn(self, model: Any, loaded: Iterable[str], turn: Change) -> None:
        """Turn what was loaded of it: the head with the norm before it, whose weights it takes over."""
        loaded = set(loaded)
        if self.embedding in loaded:
            change(model, self.embedding, turn)
        if self.norm.weight in loaded:
            gain = self.norm.gain(model)
            for head in self.norm.readers:
                if head.weight in loaded:
                    head.inputs(model, lambda w: turn(w * gain))
            change(model, self.norm.weight, lambda w: w.fill_(1 - self.norm.offset))

    @property
    def names(self) -> list[str]:
        """All of it."""
        return [self.embedding, self.norm.weight, *(head.weight for head in self.norm.readers)]


class Turned(Weights):
    """A model's weights that are turned as soon as they are loaded, by layers and outside of them."""

    def __init__(self, one: Replica, anatomies: Mapping[str, Anatomy], outside: Outside) -> None:
        vars(self).update(vars(one.weights))
        self._whole, self._anatomies, self._outside = one.model, anatomies, outside
        width = outside.norm.width
        self._turn, self._heads = hadamard(signs(width)), hadamard()

    def load(self, wanted: Iterable[str]) -> None:
        """Load as ever, and turn."""
        wanted = list(wanted)
        super().load(wanted)
        self._outside.turn(self._whole, wanted, self._turn)
        for name, anatomy in self._anatomies.items():
            if any(each.startswith(f"{name}.") for each in wanted):
                anatomy.turn(self._whole.get_submodule(name), self._turn, self._heads)
