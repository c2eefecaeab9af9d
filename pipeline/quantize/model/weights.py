"""Where the weights of linear modules lie on disk: plain, FP8 in blocks, or stacked as the experts of a mixture.

**FP8 in blocks** is DeepSeek's layout, which others took over: ``X.weight`` F8_E4M3 [O, I] beside
``X.weight_scale_inv`` F32 [ceil(O/128), ceil(I/128)]. The name says inverse, but a weight is the stored number times
its block's scale. Other sources that are not 16 bit are refused.

**Experts** are stacked in the module, one by one or stacked on disk, one by one in a quantized checkpoint:

    model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  ->  model.layers.0.mlp.experts.{e}.gate_proj [I, H]
                                                            model.layers.0.mlp.experts.{e}.up_proj   [I, H]

Which of the last two dimensions is the output is what the module says, never what the sizes suggest: where
2I = H they suggest nothing. A checkpoint may hold the transpose of what the module does; transformers then has the
transposition among the operations that load it. vLLM and llm-compressor know the experts by the names above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from calibration.lazy import torch
from pipeline.base.errors import UserError
from pipeline.quantize.formats.checkpoint import TensorInfo
from pipeline.recipe.modules import declared_quantization


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the 16-bit weight [O, I] of one linear module comes from.

    ``tensor`` is a name on disk. ``expert`` picks an entry of the first dimension of a tensor that stacks experts,
    ``rows`` the output rows [first, last) of that matrix (gate and up lie in one), and ``transposed`` says that it is
    stored as [I, O]. ``scale`` names the tensor of block scales that an FP8 source is multiplied with.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's parts under their names on disk; single experts under the names that they are written with.

    ``linear`` are the modules that schemes apply to, with [out_features, in_features]; ``kept`` the modules with a
    two-dimensional weight that stay in 16 bit (output head, routers, vision towers, layers that only a multi-token
    predictor uses), with the head also where it shares the embedding's tensor; ``attention`` the attention modules in
    order of their layer; ``parameters`` counts all elements of the model.

    ``weights`` says for each linear module where its weight lies: the tensors that it names as stacks are not in the
    quantized checkpoint. ``encoded`` maps each FP8 weight of the source to its block scales. ``modules`` maps linear
    and attention modules to their names in transformers' model, with ``{experts}.{number}.{projection}`` for one
    of the experts that it stacks. ``quantized_by`` is set where the folder is no source at all.

    ``faults`` are contradictions between the configuration and the tensors on disk, each a rule, a tensor and words:
    what the configuration implies and nobody stored, what has another shape, and what is stored for no module.
    """

    linear: Mapping[str, tuple[int, int]]
    kept: tuple[str, ...]
    attention: tuple[str, ...]
    parameters: int
    weights: Mapping[str, WeightSource] = field(default_factory=dict, compare=False)
    encoded: Mapping[str, str] = field(default_factory=dict, compare=False)
    modules: Mapping[str, str] = field(default_factory=dict, compare=False)
    quantized_by: str | None = field(default=None, compare=False)
    faults: tuple[tuple[str, str, str], ...] = field(default=(), compare=False)

    def require_whole(self, where: object) -> None:
        """Raise `UserError` where the tensors of ``where`` are not those that its configuration implies."""
        if self.faults:
            (_, name, message), more = self.faults[0], len(self.faults) - 1
            others = f"; {more} more tensor{'s contradict' if more > 1 else ' contradicts'} it" if more else ""
            raise UserError(f"{where}: found weights that are not those of config.json: {name}: {message}{others}.")


_BLOCK = 128
_SUFFIX = "_scale_inv"


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The ``quant_method`` of a source that cannot be decoded; None for 16 bit and for FP8 in blocks of 128x128."""
    declared = declared_quantization(config)
    if declared is None:
        return None
    method, block = str(declared.get("quant_method")), declared.get("weight_block_size")
    if method == "fp8" and list(block or ()) == [_BLOCK, _BLOCK]:
        return None
    return f"{method}, {'per tensor' if not block else f'in blocks of {block}'}" if method == "fp8" else method


def encoded_weights(config: Mapping[str, Any], tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, str]:
    """Name of each FP8 weight of a source with the name of its block scales; nothing for a 16-bit source.

    Raises `UserError` for an FP8 weight without scales and for scales of another shape.
    """
    declared = declared_quantization(config)
    if declared is None or declared.get("quant_method") != "fp8" or quantized_by(config) is not None:
        return {}
    found: dict[str, str] = {}
    for name, (_, info) in tensors.items():
        if info.dtype != "F8_E4M3":
            continue
        scale = tensors.get(name + _SUFFIX)
        if scale is None or len(info.shape) != 2:
            raise UserError(f"{name}: it is F8_E4M3 {list(info.shape)}, but there is no {name + _SUFFIX} to decode it.")
        blocks = tuple(ceil(size / _BLOCK) for size in info.shape)
        if scale[1].shape != blocks or scale[1].dtype not in ("F32", "BF16"):
            raise UserError(
                f"{name + _SUFFIX}: it is {scale[1].dtype} {list(scale[1].shape)}, expected F32 {list(blocks)} "
                f"for {name} {list(info.shape)}."
            )
        found[name] = name + _SUFFIX
    return found


# Parameter of the module: the projections of an expert that it stacks.
_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
_PARAMETERS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Classes without transformers' marks (is_transposed and so on): what their forward does.
_TRANSPOSED = {"Llama4TextExperts": True}
_ONE = re.compile(r"(.+)\.(\d+)\.([^.]+)")


def stacks_experts(module: Any) -> bool:
    """Whether a module holds the projections of several experts in 3-D parameters."""
    return any(name in _PARTS and p.ndim == 3 for name, p in module.named_parameters(recurse=False))


def stacked_name(module_name: str) -> Iterator[str]:
    """The 3-D parameters, by their likely names on disk, that a single expert's projection may be a part of."""
    if one := _ONE.fullmatch(module_name):
        part = _MIXTRAL.get(one[3], one[3])
        yield from (f"{one[1]}.{name}" for name in dict.fromkeys((_PARAMETERS.get(part, part), part)))


def part_of(module_name: str) -> tuple[int, str] | None:
    """Number and projection of a single expert's module, under whatever names; None for any other name."""
    one = _ONE.fullmatch(module_name)
    return (int(one[2]), _MIXTRAL.get(one[3], one[3])) if one else None


def other_experts(stored: Sequence[str], own: str, experts: int) -> list[str]:
    """Projections of single experts that lack among the ``stored`` ones of the stack ``own``; none for other names."""
    found: dict[tuple[str, int, str], str] = {}
    for name in stored:
        if one := _ONE.fullmatch(name.removesuffix(".weight")):
            found[one[1], int(one[2]), _MIXTRAL.get(one[3], one[3])] = one[3]
    spelled = {part: last for (_, _, part), last in found.items()}
    return [
        f"{prefix}.{expert}.{spelled.get(part, part)}.weight"
        for prefix in dict.fromkeys(prefix for prefix, _, _ in found)
        for expert in range(experts)
        for part in _PARTS[own.rpartition(".")[2]]
        if (prefix, expert, part) not in found
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a stack that is one projection of one expert: ``parameter``[expert], transposed to [O, I] where it
    is stored as [I, O], and of that the rows [first, last)."""

    parameter: str
    expert: int
    rows: tuple[int, int]
    transposed: bool

    def of(self, stack: torch.Tensor) -> torch.Tensor:
        """The projection, [O, I], as a view of its stack."""
        part = stack[self.expert]
        return (part.t() if self.transposed else part)[slice(*self.rows)]


def place_of(experts: Any, name: str, expert: int, projection: str) -> Place:
    """Where a module that stacks experts, called ``name`` in the model, holds a projection of one of them."""
    stacks = dict(experts.named_parameters(recurse=False))
    key = next(key for key, parts in _PARTS.items() if projection in parts and key in stacks)
    own = f"{name}.{key}"
    height, _ = expert_shape(experts, own, stacks[key])
    first = _PARTS[key].index(projection) * height
    return Place(key, expert, (first, first + height), _is_transposed(experts, own))


def expert_shape(experts: Any, own: str, parameter: torch.Tensor) -> tuple[int, int]:
    """[out_features, in_features] of one projection of one expert, from the parameter ``own`` that stacks it."""
    rows, columns = _matrix(experts, own, parameter)
    return rows // len(_PARTS[own.rpartition(".")[2]]), columns


def split(
    name: str, own: str, experts: Any, parameter: torch.Tensor, shape: Sequence[int], operations: Sequence[Any]
) -> Iterator[tuple[str, str, WeightSource]]:
    """Take a stack on disk apart: module as it is written, module as calibration knows it, and the source.

    ``name`` with ``shape`` is the tensor on disk, ``own`` the parameter, [E, O, I] or [E, I, O], that it becomes by
    transformers' ``operations``. Raises `UserError` where it cannot be taken apart without a guess.
    """
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    if last not in _PARTS:
        raise _refused(name, "its name is not one that servers know single experts by")
    rows, _ = _matrix(experts, own, parameter)
    transposed = _is_transposed(experts, own) ^ _is_turned(name, shape, parameter, operations)
    parts = _PARTS[last]
    height = rows // len(parts)
    for expert in range(parameter.shape[0]):
        for number, part in enumerate(parts):
            taken = (number * height, (number + 1) * height) if len(parts) > 1 else None
            source = WeightSource(name, expert=expert, rows=taken, transposed=transposed)
            yield f"{prefix}.{expert}.{part}", f"{own.rpartition('.')[0]}.{expert}.{part}", source


def _matrix(experts: Any, own: str, parameter: torch.Tensor) -> tuple[int, int]:
    _, first, second = parameter.shape
    return (second, first) if _is_transposed(experts, own) else (first, second)


def _is_transposed(experts: Any, own: str) -> bool:
    """Whether the module multiplies inputs with [I, O], as transformers marks it or the class is known to."""
    kind = type(experts).__name__
    if not getattr(experts, "is_concatenated", True):
        raise _refused(own, f"{kind} interleaves the columns of gate and up")
    if getattr(experts, "has_bias", False):
        raise _refused(own, f"the experts of {kind} have biases")
    marked = getattr(experts, "is_transposed", _TRANSPOSED.get(kind))
    if marked is None:
        raise _refused(own, f"{kind} does not say which of its dimensions is the output")
    return bool(marked)


def _is_turned(name: str, shape: Sequence[int], parameter: torch.Tensor, operations: Sequence[Any]) -> bool:
    """Whether the tensor on disk is the transpose of the parameter."""
    from transformers.core_model_loading import Transpose

    straight = tuple(parameter.shape)
    turned = (straight[0], straight[2], straight[1])
    if any(not isinstance(operation, Transpose) for operation in operations) or len(operations) > 1:
        kinds = ", ".join(type(operation).__name__ for operation in operations)
        raise _refused(name, f"transformers rearranges it when it loads it ({kinds})")
    if operations and operations[0].check_dims and straight == turned:
        raise _refused(name, f"it is {list(shape)}, and either of the last two dimensions may be the output")
    expected = (straight, turned) if operations and operations[0].check_dims else (turned if operations else straight,)
    if tuple(shape) not in expected:
        raise UserError(
            f"{name}: it is {list(shape)}, expected {' or '.join(str(list(one)) for one in expected)} from config.json."
        )
    return tuple(shape) != straight or (bool(operations) and straight == turned)


def _refused(name: str, reason: str) -> UserError:
    return UserError(
        f"{name}: this stack of experts cannot be taken apart: {reason}.",
        hint="Quantize this model with `engine: llmcompressor` or `engine: quark`.",
    )
