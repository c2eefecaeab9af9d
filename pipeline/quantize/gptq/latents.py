"""Learn to which of its neighbours each weight in groups, as in MXFP4, is rounded, by gradient descent.

A latent weight is an element before it is rounded: it starts at the value that GPTQ chose, and the gradient at the
rounded weight moves it (straight through, arXiv 1308.3432), until it is nearer to another value. Scales stay as GPTQ
chose them. Latent weights of a layer are brought to the device when the layer runs, with their two moments in 16 bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from quantmint.calibration.activations import save_whole
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.engines.stream.shard import ERRORS, error_of
from quantmint.pipeline.quantize.gptq.descent import descend
from quantmint.pipeline.quantize.gptq.weights import Member
from quantmint.pipeline.quantize.schemes.elements import to_nearest
from quantmint.pipeline.quantize.schemes.scheme import Grid, Kernel, Parts

RATE, NARROW_RATE = 0.01, 0.003
"""First step of a latent weight, and of one whose inputs have four bits, in units of its scale.

Steps fall to zero linearly. The rounding of such inputs makes gradients noisier.
"""
LATENT_BYTES = 9
"""Bytes of a latent weight: float32, two moments in 16 bit, and its share in scales."""
STEP_BYTES = 20
"""Bytes on the device for each latent weight of the layer that is run: gradients, and copies in float32."""
STATE_BYTES = 8
"""Bytes of a latent weight in the state of an interrupted run: the same without scales."""
FILES = "learned-*.safetensors"

Leaves = dict[str, "torch.Tensor"]
"""Latent weights [O, I] in float32, on the device, by step."""


@dataclass(frozen=True, slots=True)
class _Latent:
    """A latent weight, float32 [O, I] in units of its scales [O, I / group], with the moments of its gradients.

    ``parts`` is what GPTQ stored of it, in which the elements' role is ``packed``.
    """

    member: Member
    parts: Parts
    packed: str
    scales: torch.Tensor
    numbers: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor


def is_learned(member: Member) -> bool:
    """Return whether a member's rounding can be learned: GPTQ chose the scale of each of its groups."""
    return member.step.kernel is not None and not member.step.untouched and has_groups(member.kernel)


def has_groups(kernel: Kernel) -> bool:
    """Return whether GPTQ chooses scales of groups for a kernel."""
    return kernel.grid is not None and kernel.grid.group > 1


def latent_bytes(members: Sequence[Member]) -> int:
    """Return the bytes that the latent weights of ``members`` take."""
    return LATENT_BYTES * sum(prod(member.step.origin.shape) for member in members if is_learned(member))


def step_bytes(members: Sequence[Member], layers: Sequence[str]) -> int:
    """Return the bytes on the device that the latent weights of the largest of the ``layers`` take while it is run."""
    sizes = dict.fromkeys(layers, 0)
    for member in filter(is_learned, members):
        layer = next((layer for layer in layers if member.parameter.startswith(f"{layer}.")), None)
        if layer is not None:
            sizes[layer] += prod(member.step.origin.shape)
    return STEP_BYTES * max(sizes.values())


class LatentWeights:
    """The latent weights of a model's ``layers``, on the device ``place`` between the layer's runs on ``device``.

    ``stored(member)`` returns what GPTQ stored of a member. ``folder`` holds each layer's weights before rounding, by
    step, in files named by the layer's number; members without one there are not learned. ``narrow`` are the steps
    whose inputs have four bits.
    """

    def __init__(
        self,
        layers: Sequence[str],
        members: Sequence[Member],
        stored: Callable[[Member], Parts],
        folder: Path,
        device: str,
        place: str,
        narrow: Collection[str],
    ) -> None:
        from safetensors import safe_open

        self._device, self._place, self._folder, self._narrow = device, place, folder, narrow
        self._layers: list[list[_Latent]] = []
        for number, layer in enumerate(layers):
            with safe_open(_file(folder, number), framework="pt") as weights:
                named = set(weights.keys())
            inside = [member for member in members if member.parameter.startswith(f"{layer}.")]
            self._layers.append(
                [self._latent(member, stored(member)) for member in inside if member.step.name in named]
            )

    def _latent(self, member: Member, stored: Parts) -> _Latent:
        packed = next(role for role in stored if not role.endswith("_scale"))
        parts = {role: part.to(self._device) for role, part in stored.items()}
        numbers, scales = _elements(member.kernel, parts, packed)
        mean, square = (torch.zeros(numbers.shape, dtype=torch.bfloat16, device=self._place) for _ in range(2))
        return _Latent(member, stored, packed, scales.to(self._place), numbers.to(self._place), mean, square)

    def leaves(self, layer: int) -> Leaves:
        """Return a layer's latent weights on the device, each a copy that requires a gradient."""
        return {
            latent.member.step.name: latent.numbers.to(self._device, copy=True).requires_grad_()
            for latent in self._layers[layer]
        }

    def replace_weights(
        self, layer: int, leaves: Mapping[str, torch.Tensor], parameters: dict[str, torch.Tensor], at: int
    ) -> None:
        """Put a layer's rounded weights into its ``parameters``, whose names lack the first ``at`` characters.

        Without a leaf of ``leaves`` a weight is taken from the latent weights themselves.
        """
        copied = set[str]()
        for latent in self._layers[layer]:
            member, name = latent.member, latent.member.parameter[at:]
            numbers = leaves.get(member.step.name)
            numbers = latent.numbers.to(self._device) if numbers is None else numbers
            weight = _rounded_weights().apply(numbers, latent.scales.to(self._device), _grid(member.kernel))
            weight = weight.to(parameters[name].dtype)
            if member.view is None:
                parameters[name] = weight
                continue
            if name not in copied:
                parameters[name] = parameters[name].clone()
                copied.add(name)
            member.view(parameters[name]).copy_(weight)

    def descend(self, layer: int, gradients: Mapping[str, torch.Tensor], share: float, step: int) -> None:
        """Go step number ``step`` of a layer's latent weights, of a ``share`` of the first steps' size."""
        with torch.no_grad():
            for latent in self._layers[layer]:
                tensors = (latent.numbers, latent.mean, latent.square)
                numbers, mean, square = (tensor.to(self._device, torch.float32) for tensor in tensors)
                name = latent.member.step.name
                rate = NARROW_RATE if name in self._narrow else RATE
                descend(numbers, gradients[name], mean, square, rate * share, step)
                grid = _grid(latent.member.kernel)
                numbers.clamp_(grid.lowest, grid.limit)
                for tensor, new in zip(tensors, (numbers, mean, square), strict=True):
                    if tensor.data_ptr() != new.data_ptr():
                        tensor.copy_(new)

    def write(self, folder: Path) -> float:
        """Write each layer's weights as they round now, a file a layer; return the share that GPTQ rounded otherwise.

        Raises `OSError`.
        """
        from safetensors import safe_open

        moved = count = 0
        for number, latents in enumerate(self._layers):
            tensors: dict[str, torch.Tensor] = {}
            errors = {}
            with safe_open(_file(self._folder, number), framework="pt", device=self._device) as weights:
                for latent in latents:
                    name, kernel = latent.member.step.name, latent.member.kernel
                    before = {role: part.to(self._device) for role, part in latent.parts.items()}
                    rounded = _rounded(latent.numbers.to(self._device), _grid(kernel))
                    moved += int((rounded != _elements(kernel, before, latent.packed)[0]).sum())
                    count += rounded.numel()
                    parts = before | {latent.packed: _packed(kernel, rounded)}
                    errors[name] = astuple(error_of(weights.get_tensor(name), parts, kernel.name))
                    tensors |= {f"{name}.{role}": part.cpu() for role, part in parts.items()}
            empty = json.dumps({})
            metadata = {"gains": empty, "ranges": empty, ERRORS: json.dumps(errors)}
            save_whole(folder / FILES.replace("*", f"{number:05}"), tensors, metadata)
        return moved / max(count, 1)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that an interrupted run resumes from, by name; they may be written to."""
        for latents in self._layers:
            for latent in latents:
                for kind in ("numbers", "mean", "square"):
                    yield f"{latent.member.step.name}.{kind}", getattr(latent, kind)


def save_weights(folder: Path, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a layer's weights before rounding, by step, for `LatentWeights`. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_whole(_file(folder, layer), weights, {"format": "pt"})  # without any entry, a file of no tensors is unreadable


def _file(folder: Path, layer: int) -> Path:
    return folder / f"{layer:05}.safetensors"


def _grid(kernel: Kernel) -> Grid:
    assert kernel.grid is not None  # noqa: S101 - of every learned member
    return kernel.grid


def _packed(kernel: Kernel, elements: torch.Tensor) -> torch.Tensor:
    pack = _grid(kernel).pack
    assert pack is not None  # noqa: S101 - every grid of groups has it
    return pack(elements)


def _elements(kernel: Kernel, parts: Parts, packed: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a stored weight, float32 [O, I], and their scales [O, I / group]."""
    weight = kernel.decode(parts)
    scales = kernel.decode(parts | {packed: _packed(kernel, torch.ones_like(weight))})  # elements of one
    elements = torch.where(weight == 0, 0.0, weight / scales)  # the smallest scales may be zero to a GPU
    return _rounded(elements, _grid(kernel)), scales[:, :: _grid(kernel).group].contiguous()


def _rounded(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the nearest values of a grid."""
    rounded = to_nearest(numbers, grid.mantissa, grid.least, out=torch.empty_like(numbers))
    return rounded.clamp_(grid.lowest, grid.limit)


@cache
def _rounded_weights() -> Any:
    class RoundedWeights(torch.autograd.Function):
        """Round elements and multiply them with their scales; the gradient is that of the product alone."""

        @staticmethod
        def forward(ctx: Any, numbers: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
            wide = scales.repeat_interleave(grid.group, 1)[:, : numbers.shape[1]]
            ctx.save_for_backward(wide)
            return _rounded(numbers, grid) * wide

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (wide,) = ctx.saved_tensors
            return gradient * wide, None, None

    return RoundedWeights
