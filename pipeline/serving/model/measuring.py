"""The pieces of a model as its shards' headers have them: real bytes, sorted by name into what vLLM does with them.

No weight is read. A name that nothing is known of is taken for a matrix that tensor parallelism divides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.formats.header import TensorInfo
from pipeline.serving.model.parts import Piece, Role, Split

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SCALES = re.compile(r"(_scale|_scale_inv|_scales|\.scales|\.qzeros|\.g_idx|_zero_point|weight_shape|_scale_2)$")

# The first that is found in a name decides; order matters: an expert's projection is no dense one.
_SORTS: tuple[tuple[str, Role, Split], ...] = (
    (r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder)\.", "encoder", "encoder"),
    (r"multi_modal_projector|mm_projector", "encoder", "encoder"),
    (r"(^|\.)mtp\.|\.(eh_proj|enorm|hnorm|shared_head)\b", "mtp", "copied"),
    (r"embed_tokens|wte\.", "embeddings", "vocabulary"),
    (r"lm_head", "head", "vocabulary"),
    (r"\.shared_expert_gate|\.router\.|\.gate\.(weight|bias|e_score)", "router", "copied"),
    (r"shared_expert|shared_mlp", "shared-experts", "shared"),
    (r"\.experts\.", "experts", "experts"),
    (r"\.indexer\.", "indexer", "copied"),
    (r"norm", "norms", "copied"),
    (r"q_a_proj|kv_a_proj", "attention", "copied"),
    (r"\.(k|v)_proj\.", "attention", "kv"),
    (r"linear_attn|\.mamba\.|\.mixer\.", "linear-attention", "tensor"),
    (r"self_attn|\.attn\.|attention", "attention", "tensor"),
    (r"", "mlp", "tensor"),
)


@dataclass(slots=True)
class _Sum:
    role: Role
    split: Split
    layer: int | None
    parameters: int = 0
    nbytes: int = 0
    rows: int = 0
    linear: bool = False


def measure_pieces(tensors: Iterable[TensorInfo], *, layers: int) -> tuple[Piece, ...]:
    """Sum the tensors of each module; those of all experts of a layer are one piece.

    ``layers`` are the decoder's: what lies behind them belongs to a predictor of further tokens. A packed tensor's
    parameters are the elements that are stored.
    """
    sums: dict[str, _Sum] = {}
    for info in tensors:
        name = _EXPERT.sub(".experts.0.", info.name)
        found = _LAYER.search(name)
        layer = int(found[1]) if found else None
        role, split = next((role, split) for pattern, role, split in _SORTS if re.search(pattern, name))
        if role in ("encoder", "mtp") or (layer is not None and layer >= layers):
            role, layer = "encoder" if role == "encoder" else "mtp", None
        entry = sums.setdefault(name.rpartition(".")[0] + f"|{role}|{split}", _Sum(role, split, layer))
        entry.nbytes += info.nbytes
        if _SCALES.search(name):
            continue
        entry.parameters += info.parameters
        if len(info.shape) >= 2 and role not in ("embeddings", "head", "router", "norms", "encoder"):
            entry.linear = entry.linear or "conv" not in name
            entry.rows += info.parameters // info.shape[-1]
    return tuple(
        Piece(key.partition("|")[0], s.layer, s.role, s.split, s.parameters, s.nbytes, s.rows, s.linear)
        for key, s in sums.items()
    )
