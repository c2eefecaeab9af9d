"""Experts of a mixture: which module stacks them, and where one projection of one expert lies.

Experts are stacked in the module, and one by one or stacked on disk; in a quantized checkpoint they are one by one:

    model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  ->  model.layers.0.mlp.experts.{e}.gate_proj [I, H]
                                                            model.layers.0.mlp.experts.{e}.up_proj   [I, H]

Which of the last two dimensions is the output is what the module says, never what the sizes suggest: where 2I = H they
suggest nothing. A checkpoint may hold the transpose of what the module does; transformers then has the transposition
among the operations that load it.

Where the outputs of gate and up take turns (gpt-oss), both stay together: servers know one projection of 2I outputs.

`calibration.replica.STACKS` names the stacks on disk and the single experts that vLLM and llm-compressor know. A layout
of experts that is not in the table is unclaimed: a recipe must exclude its tensors by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from quantmint.calibration.encodings import Encoded, plain_name, scale_of
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import STACKS, is_interleaved
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import SIXTEEN_BIT, TensorInfo


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of the 16-bit weight [O, I] of one linear module.

    ``tensor`` is a name on disk. ``expert`` picks an entry of the first dimension of a tensor that stacks experts,
    ``rows`` the output rows [first, last) of that matrix (gate and up lie in one), and ``transposed`` says that it is
    stored as [I, O]. ``encoded`` says how a tensor that is not in 16 bit is decoded. A matrix that stacks the biases of
    experts is one of vectors: ``expert`` picks a row.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    encoded: Encoded | None = None


class UnknownLayoutError(Exception):
    """Raised for a stack of experts that no rule takes apart; the message is the reason, as part of a sentence."""


# Parameter of a module that stacks experts: the projections that it holds.
_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
_PARAMETERS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Classes without transformers' marks (is_transposed and so on): what their forward does.
_TRANSPOSED = {"Llama4TextExperts": True, "LongcatFlashExperts": False, "Step3p7Experts": False}
_SINGLE = re.compile(r"(.+)\.(\d+)\.([^.]+)")


# Names of stacks on disk, behind the name of the module, with the names of a single expert's projections.
_STACKS: Mapping[str, tuple[str, ...]] = {**{name: (f"{{}}.{name}",) for name in _PARTS}, **STACKS}


def stacks_experts(module: Any) -> bool:
    """Return whether a module holds the projections of several experts in 3-D parameters."""
    return any(name in _PARTS and p.ndim == 3 for name, p in module.named_parameters(recurse=False))


def stack_names(modules: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the 3-D parameters that stack experts, of a model's ``modules`` by name."""
    return tuple(
        f"{path}.{name}"
        for path, module in modules.items()
        for name, parameter in module.named_parameters(recurse=False)
        if name in _PARTS and parameter.ndim == 3
    )


def stack_of(module_name: str, stacks: Collection[str]) -> str | None:
    """Return which of the ``stacks`` holds a single expert's projection, by the projection's name in the model.

    None for a module that is not stacked.
    """
    if (single := _SINGLE.fullmatch(module_name)) is None:
        return None
    experts, _, projection = single.groups()
    names = (f"{experts}.{key}" for key, parts in _PARTS.items() if projection in (key, *parts))
    return next((name for name in names if name in stacks), None)


def holds_experts(module: Any) -> bool:
    """Return whether a module is a `ModuleList` of two or more modules that each contain a linear module.

    A list of experts is one, but so are a decoder's layers.
    """
    if not isinstance(module, torch.nn.ModuleList) or len(module) < 2:
        return False
    return all(any(isinstance(part, torch.nn.Linear) for part in expert.modules()) for expert in module)


def stacked_names(module_name: str) -> Iterator[str]:
    """Yield the names on disk of the stacks that may contain the projection of a single expert's module."""
    if single := _SINGLE.fullmatch(module_name):
        prefix, _, last = single.groups()
        part = _MIXTRAL.get(last, last)
        yield from (f"{prefix}.{name}" for name in dict.fromkeys((_PARAMETERS.get(part, part), part)))
        for stack, names in _STACKS.items():
            for name in names:
                inner, _, projection = name.rpartition("{}.")
                if projection == last and inner and prefix.endswith(f".{inner.rstrip('.')}"):
                    yield f"{prefix.removesuffix(inner.rstrip('.'))}{stack}"


def part_of(module_name: str) -> tuple[int, str] | None:
    """Return number and projection ("gate_proj", "up_proj", "down_proj") of a single expert's module by its name.

    None for a name that does not end with a number and a projection.
    """
    single = _SINGLE.fullmatch(module_name)
    return (int(single[2]), _MIXTRAL.get(single[3], single[3])) if single else None


def missing_experts(stored: Sequence[str], stack_name: str, owner: Any, experts: int) -> list[str]:
    """Return the names of single experts' tensors of stack ``stack_name`` that are not among the ``stored`` names.

    ``owner`` is the module of the stack, ``experts`` the number of experts. Empty where none of the stored names is
    that of a single expert.
    """
    parts = _parts(owner, stack_name)
    last_names: dict[tuple[str, int, str], str] = {}
    for name in stored:
        if single := _SINGLE.fullmatch(name.removesuffix(".weight")):
            last_names[single[1], int(single[2]), _MIXTRAL.get(single[3], single[3])] = single[3]
    spelled = {part: last for (_, _, part), last in last_names.items()}
    return [
        f"{prefix}.{expert}.{spelled.get(part, part)}.weight"
        for prefix in dict.fromkeys(prefix for prefix, _, _ in last_names)
        for expert in range(experts)
        for part in parts
        if (prefix, expert, part) not in last_names
    ]


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The part of a stack of experts that is one projection of one expert.

    It is ``parameter``[expert], transposed to [O, I] where it is stored as [I, O], and of that the rows [first, last).
    """

    parameter: str
    expert: int
    rows: tuple[int, int]
    transposed: bool

    def of(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the projection, [O, I], as a view of the parameter ``stack``."""
        part = stack[self.expert]
        return (part.t() if self.transposed else part)[slice(*self.rows)]


def expert_slice(experts: Any, name: str, expert: int, projection: str) -> ExpertSlice:
    """Return the slice of a stack that holds one projection of one expert.

    ``experts`` is the module that stacks experts, called ``name`` in the model. Raises `UserError` for a layout that no
    rule takes apart.
    """
    stacks = dict(experts.named_parameters(recurse=False))
    key = next((key for key in _PARTS if key in stacks and projection in _parts(experts, key)), None)
    if key is None:
        raise UserError(f"{name}: found no stack of experts that holds {projection}; there are {', '.join(stacks)}.")
    stack_name = f"{name}.{key}"
    try:
        height, _ = expert_shape(experts, stack_name, stacks[key])
        first = _parts(experts, key).index(projection) * height
        return ExpertSlice(key, expert, (first, first + height), _is_transposed(experts))
    except UnknownLayoutError as error:
        raise UserError(f"{stack_name}: this stack of experts cannot be taken apart: {error}.") from None


def expert_shape(experts: Any, stack_name: str, parameter: torch.Tensor) -> tuple[int, int]:
    """Return [out_features, in_features] of one projection of one expert, from the ``parameter`` that stacks it.

    Raises `UnknownLayoutError` where the layout of the module ``experts`` is unknown.
    """
    rows, columns = _matrix(experts, parameter)
    return rows // len(_parts(experts, stack_name)), columns


def _parts(experts: Any, stack_name: str) -> tuple[str, ...]:
    """Return the projections that a stack of the module ``experts`` holds, by the stack's name."""
    last = stack_name.rpartition(".")[2]
    return (last,) if is_interleaved(experts) else _PARTS[last]


def split(
    name: str,
    stack_name: str,
    experts: Any,
    parameter: torch.Tensor,
    shape: Sequence[int],
    operations: Sequence[Any],
    encoded: Encoded | None = None,
) -> Iterator[tuple[str, str, WeightSource]]:
    """Take a stack on disk apart: yield each projection's module name on disk, its name in the model, and its source.

    The order is by expert, then by projection as the stack has them. ``name`` with ``shape`` is the tensor on disk,
    ``stack_name`` the parameter, [E, O, I] or [E, I, O], of the module ``experts`` that it becomes by ``operations``,
    the conversions that transformers applies when it loads it. An ``encoded`` stack is [E, O, n, 16], see
    `calibration.encodings`. Raises `UnknownLayoutError` where it cannot be taken apart without a guess, and `UserError`
    for a shape that contradicts config.json.
    """
    plain = plain_name(name).removesuffix(".weight")
    prefix, _, last = plain.rpartition(".")
    if last not in _STACKS:
        raise UnknownLayoutError("its name is not one that servers know single experts by")
    rows, columns = _matrix(experts, parameter)
    if encoded is None:
        transposed = _is_transposed(experts) ^ _is_turned(name, shape, parameter, operations)
    else:
        transposed, expected = False, (parameter.shape[0], rows, columns)
        if (*shape[:2], encoded.rule.elements * prod(shape[2:])) != expected:
            raise UserError(f"{name}: it is {list(shape)}, expected {list(expected)} decoded, from config.json.")
    parts = _parts(experts, stack_name)
    singles = (f"{{}}.{last}",) if is_interleaved(experts) else _STACKS[last]
    if len(singles) != len(parts):
        raise UnknownLayoutError(f"it holds {len(singles)} projections, and {stack_name} holds {len(parts)}")
    height = rows // len(parts)
    for expert in range(parameter.shape[0]):
        for number, (single, part) in enumerate(zip(singles, parts, strict=True)):
            taken = (number * height, (number + 1) * height) if len(parts) > 1 else None
            source = WeightSource(name, expert=expert, rows=taken, transposed=transposed, encoded=encoded)
            yield f"{prefix}.{single.format(expert)}", f"{stack_name.rpartition('.')[0]}.{expert}.{part}", source


def entered_projections(experts: Any) -> Iterator[str]:
    """Yield the projections that multiply the input of a module that stacks experts: gate and up."""
    for name, parameter in experts.named_parameters(recurse=False):
        if name in _PARTS and name != "down_proj" and parameter.ndim == 3:
            yield from _parts(experts, name)


def biases_of(name: str, experts: int) -> dict[str, WeightSource]:
    """Return the biases of single experts in a stack ``X.experts.Y_bias`` [E, O], by the module ``X.experts.{e}.Y``."""
    prefix, _, last = name.removesuffix("_bias").rpartition(".")
    return {f"{prefix}.{expert}.{last}": WeightSource(name, expert=expert) for expert in range(experts)}


def _matrix(experts: Any, parameter: torch.Tensor) -> tuple[int, int]:
    _, first, second = parameter.shape
    return (second, first) if _is_transposed(experts) else (first, second)


def _is_transposed(experts: Any) -> bool:
    """Return whether the module multiplies inputs with [I, O], as transformers marks it or the class is known to.

    Raises `UnknownLayoutError` where neither tells, or where experts have biases and gate and up lie one by one.
    """
    kind = type(experts).__name__
    if getattr(experts, "has_bias", False) and not is_interleaved(experts):
        raise UnknownLayoutError(f"the experts of {kind} have biases")
    marked = getattr(experts, "is_transposed", _TRANSPOSED.get(kind))
    if marked is None:
        raise UnknownLayoutError(f"{kind} does not say which of its dimensions is the output")
    return bool(marked)


def _is_turned(name: str, shape: Sequence[int], parameter: torch.Tensor, operations: Sequence[Any]) -> bool:
    """Return whether the tensor on disk is the transpose of the parameter.

    Raises `UnknownLayoutError` where that cannot be told, and `UserError` for a shape that fits neither.
    """
    from transformers.core_model_loading import Transpose

    straight = tuple(parameter.shape)
    turned = (straight[0], straight[2], straight[1])
    if any(not isinstance(operation, Transpose) for operation in operations) or len(operations) > 1:
        kinds = ", ".join(type(operation).__name__ for operation in operations)
        raise UnknownLayoutError(f"transformers rearranges it when it loads it ({kinds})")
    if operations and operations[0].check_dims and straight == turned:
        raise UnknownLayoutError(f"it is {list(shape)}, and either of the last two dimensions may be the output")
    expected = (straight, turned) if operations and operations[0].check_dims else (turned if operations else straight,)
    if tuple(shape) not in expected:
        raise UserError(
            f"{name}: it is {list(shape)}, expected {' or '.join(str(list(sizes)) for sizes in expected)} from "
            "config.json."
        )
    return tuple(shape) != straight or (bool(operations) and straight == turned)


def single_name(stacks: Iterable[tuple[str, Any]], number: int, projection: str) -> str:
    """Return a single expert's name inside the model; ``stacks`` may hold it, each with its parameter.

    Experts of one list may be split among stacks, in their order (ERNIE's for text and then those for images). Raises
    `UnknownLayoutError` where the stacks hold fewer experts.
    """
    for stack, parameter in stacks:
        if parameter is not None and number < parameter.shape[0]:
            return f"{stack.rpartition('.')[0]}.{number}.{projection}"
        number -= 0 if parameter is None else parameter.shape[0]
    raise UnknownLayoutError("it holds fewer experts than are stored")


_WHOLE = frozenset({*SIXTEEN_BIT, "F32", "F8_E4M3", "I8"})  # dtypes whose elements are not packed
_MX_GROUP = 32  # elements of a row that share an E8M0 scale


def single_shape(tensors: Mapping[str, tuple[str, TensorInfo]], name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Return [out_features, in_features] of a single expert: ``shape``, unless its stored tensor says otherwise.

    Experts of one list may have different widths (ERNIE's for text and for images).
    """
    info, scale_name = tensors[name][1], scale_of(tensors, plain_name(name))
    scale = None if scale_name is None else tensors[scale_name][1]
    is_mx = scale is not None and scale.dtype in ("U8", "F8_E8M0") and len(scale.shape) == 2
    if info.dtype in _WHOLE and len(info.shape) == 2 and not (info.dtype == "I8" and is_mx):
        return info.shape[0], info.shape[1]
    if scale is not None and is_mx:
        return info.shape[0], scale.shape[1] * _MX_GROUP
    return shape
