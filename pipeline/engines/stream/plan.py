"""The output files of a quantized checkpoint, laid out from headers alone.

Output names, dtypes, shapes and offsets follow from the input's header and the scheme, so a file's header is known
before its first byte is computed, its size can be promised beforehand, and it is written strictly from front to back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.engines.stream.kernels import kernel_name
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint
from pipeline.formats.header import ITEM_BITS, SIXTEEN_BIT, TensorInfo, encode_header
from pipeline.formats.layout import Choice, layout
from pipeline.formats.tensors import StoredTensor, weight_tensors

STATIC_ROLES = frozenset({"input_scale", "k_scale", "v_scale"})
"""Roles of tensors that measured ranges decide, and no weight."""
_ALIGNMENT = 8  # bytes; the widest element that PyTorch views in place


@dataclass(frozen=True, slots=True)
class Step:
    """One input tensor with what becomes of it; ``kernel`` is None where its bytes are copied."""

    source: TensorInfo
    kernel: str | None
    outputs: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output file: the steps in the order of the input, the tensors that are written last, and the header.

    ``deferred`` are small tensors, scales mostly, whose size is no multiple of the alignment: written between the
    others they would shift those off their alignment.
    """

    name: str
    steps: tuple[Step, ...]
    deferred: tuple[StoredTensor, ...]
    header: bytes

    @property
    def read_bytes(self) -> int:
        """Bytes read from the input."""
        return sum(step.source.nbytes for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Size of the file, bytes."""
        streamed = sum(out.nbytes for step in self.steps for out in step.outputs if not is_deferred(out))
        return len(self.header) + streamed + sum(out.nbytes for out in self.deferred)


def is_deferred(tensor: StoredTensor) -> bool:
    """Whether a tensor is written at the end of its file."""
    return tensor.nbytes % _ALIGNMENT != 0


def plan_shards(
    source: Checkpoint, choice: Choice, attention: tuple[str, ...], checkpoint_format: str
) -> tuple[ShardPlan, ...]:
    """Lay out every output file of a model.

    Raises `UserError` for a quantized module whose weight is not there in 16 bit.
    """
    kv_scales = _kv_scales(source, choice, attention, checkpoint_format)
    return tuple(_plan_shard(source, shard, choice, kv_scales, checkpoint_format) for shard in source.shards)


def _plan_shard(
    source: Checkpoint,
    shard: str,
    choice: Choice,
    kv_scales: Mapping[str, tuple[StoredTensor, ...]],
    checkpoint_format: str,
) -> ShardPlan:
    steps: list[Step] = []
    extra: list[StoredTensor] = []
    for info in source.in_shard(shard):
        module, _, role = info.name.rpartition(".")
        scheme = choice.schemes.get(module) if role == "weight" else None
        if scheme is None:
            outputs: tuple[StoredTensor, ...] = (StoredTensor(info.name, "copy", info.dtype, info.shape),)
        else:
            if info.dtype not in SIXTEEN_BIT or len(info.shape) != 2:
                raise UserError(
                    f"{source.folder / shard}: {info.name} is {info.dtype} {list(info.shape)}, "
                    f"expected a 16-bit matrix to quantize to {scheme}.",
                    hint="Quantize from the 16-bit release of the model.",
                )
            outputs = weight_tensors(checkpoint_format, scheme, module, (info.shape[0], info.shape[1]), info.dtype)
        steps.append(Step(info, None if scheme is None else kernel_name(scheme, checkpoint_format), outputs))
        extra += kv_scales.get(info.name, ())
    everything = [out for step in steps for out in step.outputs] + extra
    deferred = tuple(sorted(filter(is_deferred, everything), key=lambda out: (-ITEM_BITS[out.dtype], out.name)))
    ordered = [out for out in everything if not is_deferred(out)] + list(deferred)
    return ShardPlan(shard, tuple(steps), deferred, encode_header((out.name, out.dtype, out.shape) for out in ordered))


def _kv_scales(
    source: Checkpoint, choice: Choice, attention: tuple[str, ...], checkpoint_format: str
) -> dict[str, tuple[StoredTensor, ...]]:
    """KV scales by the tensor that they follow: the K projection of the same layer, in whose shard they belong."""
    if not choice.kv_cache:
        return {}
    form = layout(checkpoint_format)
    result: dict[str, tuple[StoredTensor, ...]] = {}
    for module in attention:
        anchor = f"{module}.k_proj.weight"
        if anchor not in source.tensors:
            raise UserError(
                f"{source.folder}: {anchor} is not there, so static FP8 KV scales have no place.",
                hint="Set `kv_cache: auto` for a model whose attention has no separate K projection.",
            )
        dtype = source.tensors[anchor][1].dtype
        result[anchor] = tuple(
            StoredTensor(name, role, dtype, form.kv_scale_shape())
            for name, role in zip(form.kv_scale_names(module), ("k_scale", "v_scale"), strict=True)
        )
    return result
