"""The output files of a quantized checkpoint, laid out from headers alone.

Output names, dtypes, shapes and offsets follow from the input's header and the scheme, so a file's header is known
before its first byte is computed, its size can be promised beforehand, and any part of it can be written when it is
ready.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.engines.stream.kernels import KERNELS, kernel_name
from pipeline.engines.stream.origin import Origin, copied, origin_of
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint
from pipeline.formats.header import ITEM_BITS, encode_header
from pipeline.formats.layout import Choice, layout
from pipeline.formats.tensors import StoredTensor, weight_tensors
from pipeline.model.structure import Structure
from pipeline.recipe.modules import scale_group, text_config

STATIC_ROLES = frozenset({"input_scale", "k_scale", "v_scale"})
"""Roles of tensors that measured ranges decide, and no weight."""
NUMBERS = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that can be quantized."""
_KEYS = ("k_proj", "qkv_proj")  # what computes K; Phi-3 has the latter
_ALIGNMENT = 8  # bytes; the widest element that PyTorch views in place


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one weight, or of one tensor that is carried over.

    ``name`` is the module or the tensor. ``kernel`` is None where the numbers stay what they are. ``group`` holds the
    origins of all weights that share one scale, this one included; empty where the scale is the weight's own.
    """

    name: str
    origin: Origin
    kernel: str | None
    outputs: tuple[StoredTensor, ...]
    group: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output file: the steps in the order of the input, the tensors that are written last, and the header.

    ``deferred`` are small tensors, scales mostly, whose size is no multiple of the alignment: written between the
    others they would shift those off their alignment. ``offsets`` gives each tensor's first byte.
    """

    name: str
    steps: tuple[Step, ...]
    deferred: tuple[StoredTensor, ...]
    header: bytes
    offsets: Mapping[str, int]

    @property
    def read_bytes(self) -> int:
        """Bytes read from the input."""
        return sum(step.origin.nbytes for step in self.steps)

    @property
    def stored(self) -> Iterator[StoredTensor]:
        """Every tensor of the file."""
        for step in self.steps:
            yield from (out for out in step.outputs if not is_deferred(out))
        yield from self.deferred

    @property
    def nbytes(self) -> int:
        """Size of the file, bytes."""
        return len(self.header) + sum(out.nbytes for out in self.stored)


def is_deferred(tensor: StoredTensor) -> bool:
    """Whether a tensor is written at the end of its file: what no weight decides, and what would misalign the rest."""
    return tensor.role in STATIC_ROLES or tensor.nbytes % _ALIGNMENT != 0


def plan_shards(
    source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str, *, shared_scales: bool = False
) -> tuple[ShardPlan, ...]:
    """Lay out every output file of a model.

    ``shared_scales`` gives the weights that vLLM loads as one (q, k, v; gate, up) one scale where a scale is per
    tensor: the largest magnitude of them all decides. Raises `UserError` for a quantized module whose weight is not
    there as a matrix of numbers.
    """
    layouter = _Layouter(source, structure, choice, checkpoint_format, shared_scales)
    return tuple(plan for shard in source.shards if (plan := layouter.shard(shard)) is not None)


class _Layouter:
    def __init__(
        self, source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str, shared_scales: bool
    ) -> None:
        self._source, self._structure, self._choice = source, structure, choice
        self._format = checkpoint_format
        self._kv_scales = _kv_scales(source, structure, choice, checkpoint_format)
        self._scales = frozenset(structure.encoded.values())
        self._consumers: defaultdict[str, list[str]] = defaultdict(list)
        for module, weight in structure.weights.items():
            self._consumers[weight.tensor].append(module)
        self._groups = self._shared() if shared_scales else {}

    def shard(self, name: str) -> ShardPlan | None:
        """Lay out one file; None where all of it is decoded away."""
        steps: list[Step] = []
        extra: list[StoredTensor] = []
        for info in self._source.in_shard(name):
            if info.name in self._scales:
                continue
            modules = self._consumers[info.name]
            if any(module in self._choice.schemes for module in modules):
                steps += map(self._taken, modules)
            else:
                steps.append(self._carried(info.name, copied(self._source, info.name, self._structure.encoded)))
            extra += self._kv_scales.get(info.name, ())
        if not steps:
            return None
        everything = [out for step in steps for out in step.outputs] + extra
        deferred = tuple(sorted(filter(is_deferred, everything), key=lambda out: (-ITEM_BITS[out.dtype], out.name)))
        ordered = [out for out in everything if not is_deferred(out)] + list(deferred)
        header = encode_header((out.name, out.dtype, out.shape) for out in ordered)
        return ShardPlan(name, tuple(steps), deferred, header, _offsets(len(header), ordered))

    def _taken(self, module: str) -> Step:
        """A weight of a tensor that is not carried over whole: of a stack some experts may stay in 16 bit."""
        if module in self._choice.schemes:
            return self._quantized(module)
        return self._carried(f"{module}.weight", origin_of(self._source, self._structure.weights[module]))

    def _carried(self, name: str, origin: Origin) -> Step:
        return Step(name, origin, None, (StoredTensor(name, "copy", origin.dtype, origin.shape),))

    def _quantized(self, module: str) -> Step:
        scheme = self._choice.schemes[module]
        origin = origin_of(self._source, self._structure.weights[module])
        if origin.dtype not in NUMBERS or len(origin.shape) != 2:
            info = origin.place.info
            raise UserError(
                f"{self._source.folder / origin.place.shard}: {info.name} is {info.dtype} {list(info.shape)}, "
                f"expected a matrix of {', '.join(sorted(NUMBERS))} to quantize to {scheme}.",
                hint="Quantize from the 16-bit release of the model.",
            )
        outputs = weight_tensors(self._format, scheme, module, (origin.shape[0], origin.shape[1]), origin.dtype)
        kernel = kernel_name(scheme, self._format)
        group = self._groups.get(module, (origin,)) if KERNELS[kernel].whole else ()
        return Step(module, origin, kernel, outputs, group)

    def _shared(self) -> dict[str, tuple[Origin, ...]]:
        """The origins behind one scale, by module."""
        members: defaultdict[str, dict[str, Origin]] = defaultdict(dict)
        for module, scheme in self._choice.schemes.items():
            if KERNELS[kernel_name(scheme, self._format)].whole:
                members[scale_group(module)][module] = origin_of(self._source, self._structure.weights[module])
        return {module: tuple(group.values()) for group in members.values() for module in group}


def _offsets(start: int, ordered: Iterable[StoredTensor]) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for out in ordered:
        offsets[out.name] = start
        start += out.nbytes
    return offsets


def _kv_scales(
    source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str
) -> dict[str, tuple[StoredTensor, ...]]:
    """KV scales by the tensor that they follow: the K projection of the same layer, in whose shard they belong."""
    if not choice.kv_cache:
        return {}
    form = layout(checkpoint_format)
    shape = form.kv_scale_shape(_kv_heads(source) if choice.kv_per_head else None)
    result: dict[str, tuple[StoredTensor, ...]] = {}
    for module in structure.attention:
        candidates = (f"{module}.{part}.weight" for part in _KEYS)
        anchor = next((name for name in candidates if name in source.tensors), None)
        if anchor is None:
            raise UserError(
                f"{source.folder}: {module} has no {' or '.join(_KEYS)} there, so static FP8 KV scales have no place.",
                hint="Set `kv_cache: auto` for a model whose attention has no K projection of its own.",
            )
        dtype = copied(source, anchor, structure.encoded).dtype
        result[anchor] = tuple(
            StoredTensor(name, role, dtype, shape)
            for name, role in zip(form.kv_scale_names(module), ("k_scale", "v_scale"), strict=True)
        )
    return result


def _kv_heads(source: Checkpoint) -> int:
    text = text_config(source.config)
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])
