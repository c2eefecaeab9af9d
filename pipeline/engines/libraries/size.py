"""What a library takes and leaves: memory for the resident model, bytes of the checkpoint."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint
from pipeline.formats.header import tensor_bytes
from pipeline.formats.layout import Choice, layout
from pipeline.formats.tensors import weight_tensors
from pipeline.model.structure import Structure

#: Of the model's bytes: weights, one layer's activations and statistics, the first quantized copies.
_FACTOR = 1.2


def checkpoint_bytes(source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str) -> int:
    """Bytes of all tensors of the checkpoint, from headers alone; scales are taken to be in the source's type."""
    total, taken = 0, set()
    for module, scheme in choice.schemes.items():
        stored = structure.weights[module].tensor
        taken.add(stored)
        dtype = source.tensors[stored][1].dtype
        tensors = weight_tensors(checkpoint_format, scheme, module, structure.linear[module], dtype)
        total += sum(tensor.nbytes for tensor in tensors)
    total += sum(info.nbytes for name, (_, info) in source.tensors.items() if name not in taken)
    if choice.kv_cache:
        form = layout(checkpoint_format)
        scales = [name for attention in structure.attention for name in form.kv_scale_names(attention)]
        total += len(scales) * tensor_bytes("BF16", ())
    return total


def require_memory(source_bytes: int, memory: int, device: str, engine: str) -> None:
    """Raise `UserError` where a library's resident model does not fit; all in bytes."""
    needed = int(source_bytes * _FACTOR)
    if needed > memory:
        raise UserError(
            f"engine {engine} holds the whole 16-bit model: about {needed / 1e9:,.1f} GB, "
            f"{device} has {memory / 1e9:,.1f} GB.",
            hint="The engine stream does not: it takes a few tensors at a time, whatever the model's size.",
        )
