"""The weights of a model by module: parameters, stored bytes, and how vLLM divides them among ranks.

`count_weights` computes them from a configuration, by the layers that transformers 5.17 builds; `measure_weights` reads
them from the headers of shards. The weights of one module in all experts of a layer are one entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantmint.pipeline.base.schemes import SCALE_BITS, table
from quantmint.pipeline.quantize.formats.checkpoint import TensorInfo
from quantmint.pipeline.serving.model.architecture import OVERLAPPING, Shape, integer

Role = Literal[
    "embeddings", "head", "attention", "indexer", "linear-attention", "mlp", "experts", "shared-experts", "router",
    "norms", "encoder", "mtp",
]  # fmt: skip

Split = Literal["tensor", "kv", "vocabulary", "experts", "shared", "encoder", "copied"]
"""How ranks divide a weight: by tensor parallelism; by it, but into at most one part per KV head; by vocabulary rows;
over all ranks of a server; as shared experts; as a vision tower; or not at all (every rank has a copy)."""

OTHER_BITS = {"awq": 4.15625, "gptq": 4.15625, "nvfp4": 4.5, "bitsandbytes": 4.5}
"""Bits per weight including scales, for methods that quantmint does not write: groups of 128 with a 16-bit scale and a
4-bit zero point; groups of 16 with an E4M3 scale; groups of 64 with a float32 scale."""

_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_5_vl_text", "qwen2_vl_text", "qwen2_vl", "qwen2_5_vl")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_next", "qwen3_5", "gemma3", "olmo2")
_CORRECTED = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe")
_FOUR_NORMS = ("gemma2", "gemma3", "olmo2", "glm4")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SCALES = re.compile(r"(_scale|_scale_inv|_scales|\.scales?|\.qzeros|\.g_idx|_zero_point|weight_shape|_scale_2)$")

# The first pattern that matches a tensor's name decides, so experts stand before dense projections.
_ROLES: tuple[tuple[str, Role, Split], ...] = (
    (r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder)\.", "encoder", "encoder"),
    (r"multi_modal_projector|mm_projector", "encoder", "encoder"),
    (r"(^|\.)mtp\.|\.(eh_proj|enorm|hnorm|shared_head)\b", "mtp", "copied"),
    (r"embed_tokens|wte\.|^embed\.", "embeddings", "vocabulary"),
    (r"lm_head|^head\.", "head", "vocabulary"),
    (r"\.shared_expert_gate|\.router\.|\.gate\.(weight|bias|e_score|tid2eid)", "router", "copied"),
    (r"shared_expert|shared_mlp", "shared-experts", "shared"),
    (r"\.experts\.", "experts", "experts"),
    (r"\.indexer\.", "indexer", "copied"),
    (r"norm|(^|\.)hc_", "norms", "copied"),
    (r"q_a_proj|kv_a_proj|\.wq_a\.|\.wkv\.|\.compressor\.", "attention", "copied"),
    (r"\.(k|v)_proj\.", "attention", "kv"),
    (r"linear_attn|\.mamba\.|\.mixer\.", "linear-attention", "tensor"),
    (r"self_attn|\.attn\.|attention", "attention", "tensor"),
    (r"", "mlp", "tensor"),
)


@dataclass(frozen=True, slots=True)
class ModuleWeight:
    """The weight of one module, or of the same module in all experts of a layer.

    ``name`` is the module's name on disk, for experts that of expert 0; ``layer`` is None outside the decoder's layers.
    ``rows`` counts output channels, over all experts. ``linear`` marks matrices that quantization may change.
    """

    name: str
    layer: int | None
    role: Role
    split: Split
    parameters: int
    nbytes: int
    rows: int = 0
    linear: bool = False

    def stored(self, scheme: str | None) -> ModuleWeight:
        """Return the weight as stored in a scheme, with its scales; None and unknown schemes are 16 bit."""
        row = table().get(str(scheme))
        bits = self.parameters * (OTHER_BITS.get(str(scheme), 16.0) if row is None else row.bits_per_weight)
        if row is not None and row.weight.granularity == "per_channel":  # one scale a row
            bits += self.rows * SCALE_BITS[row.weight.scale]
        return replace(self, nbytes=round(bits / 8))


def count_weights(config: Mapping[str, Any], shape: Shape) -> tuple[ModuleWeight, ...]:
    """Return every weight of a configuration with this shape, in 16 bit.

    Weights for multi-token prediction are left out: vLLM loads them only for speculative decoding.
    """
    if shape.compressed:
        return tuple(_compressed_model(shape))
    body, head = "model.", "lm_head"
    if isinstance(config.get("text_config"), Mapping):
        qwen = str(config.get("model_type", "")).startswith("qwen")
        body, head = ("model.language_model.", head) if qwen else ("language_model.model.", "language_model.lm_head")
    weights = [_matrix(f"{body}embed_tokens", None, "embeddings", "vocabulary", shape.vocabulary, shape.hidden)]
    for number, (kind, feed) in enumerate(zip(shape.kinds, shape.feeds, strict=True)):
        weights += _layer(shape, f"{body}layers.{number}.", number, kind, feed)
    weights.append(_vector(f"{body}norm", None, "norms", shape.hidden))
    if not shape.tied:
        weights.append(_matrix(head, None, "head", "vocabulary", shape.vocabulary, shape.hidden))
    weights += _encoder(config, shape.hidden)
    return tuple(weights)


def _layer(shape: Shape, prefix: str, number: int, kind: str, feed: str) -> Iterator[ModuleWeight]:
    if kind in ("full", "sliding", "chunked"):
        yield from _latent(shape, prefix, number) if shape.latent else _attention(shape, prefix, number)
    elif kind != "none":
        yield from _recurrent(shape, prefix, number, kind)
    if feed == "experts":
        yield from _experts(shape, f"{prefix}mlp.", number)
    elif feed == "dense":
        width = shape.shared_intermediate if not shape.experts and shape.shared_intermediate else shape.intermediate
        yield from _feed(shape, f"{prefix}mlp.", number, "mlp", "tensor", width)
        if shape.fields.get("mlp_bias"):
            yield _vector(f"{prefix}mlp.biases", number, "mlp", 2 * width + shape.hidden)
    norms = 4 if shape.text_type.startswith(_FOUR_NORMS) else (kind != "none") + (feed != "none")
    yield _vector(f"{prefix}norms", number, "norms", norms * shape.hidden)


def _attention(shape: Shape, prefix: str, number: int) -> Iterator[ModuleWeight]:
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # In these models the query projection also computes a gate of the attention's output.
    doubled = shape.text_type.startswith(("qwen3_next", "qwen3_5"))
    at = f"{prefix}self_attn."
    yield _linear(f"{at}q_proj", number, "attention", "tensor", query * (1 + doubled), shape.hidden)
    yield _linear(f"{at}k_proj", number, "attention", "kv", value, shape.hidden)
    yield _linear(f"{at}v_proj", number, "attention", "kv", value, shape.hidden)
    yield _linear(f"{at}o_proj", number, "attention", "tensor", shape.hidden, query)
    everywhere = bool(shape.fields.get("attention_bias"))
    output = everywhere and not shape.text_type.startswith(("glm4", "ernie"))
    biases = (query + 2 * value if everywhere or shape.text_type in _QKV_BIAS else 0) + output * shape.hidden
    norms = 2 * shape.head_dim * shape.text_type.startswith(_HEAD_NORMS)
    norms += (query + value) * shape.text_type.startswith("minimax_m2")  # which has one norm over all heads
    sinks = shape.heads * (shape.text_type == "gpt_oss")
    yield _vector(f"{at}vectors", number, "attention", biases + norms + sinks)


def _latent(shape: Shape, prefix: str, number: int) -> Iterator[ModuleWeight]:
    """Yield the weights of latent attention; the down-projections to latents are copied to every rank."""
    latent, at = shape.latent, f"{prefix}self_attn."
    assert latent is not None  # noqa: S101 - the caller asked
    keys = shape.heads * (latent.nope + latent.rope)
    norms = latent.rank
    if latent.query_rank:
        yield _linear(f"{at}q_a_proj", number, "attention", "copied", latent.query_rank, shape.hidden)
        yield _linear(f"{at}q_b_proj", number, "attention", "tensor", keys, latent.query_rank)
        norms += latent.query_rank
    else:
        yield _linear(f"{at}q_proj", number, "attention", "tensor", keys, shape.hidden)
    kv = latent.rank + latent.rope
    yield _linear(f"{at}kv_a_proj_with_mqa", number, "attention", "copied", kv, shape.hidden)
    up = shape.heads * (latent.nope + latent.value)
    yield _linear(f"{at}kv_b_proj", number, "attention", "tensor", up, latent.rank)
    yield _linear(f"{at}o_proj", number, "attention", "tensor", shape.hidden, shape.heads * latent.value)
    yield _vector(f"{at}norms", number, "norms", norms)
    if shape.indexer:
        heads, size = shape.indexer
        width = latent.query_rank or shape.hidden
        yield _linear(f"{at}indexer.wq_b", number, "indexer", "copied", heads * size, width)
        yield _linear(f"{at}indexer.wk", number, "indexer", "copied", size, shape.hidden)
        # vLLM never quantizes this projection, whatever the checkpoint declares.
        yield _matrix(f"{at}indexer.weights_proj", number, "indexer", "copied", heads, shape.hidden)
        yield _vector(f"{at}indexer.k_norm", number, "norms", 2 * size)


def _compressed_model(shape: Shape) -> Iterator[ModuleWeight]:
    """Yield the weights of DeepSeek V4, named as in its release; vLLM copies its latents' and compressors' weights.

    Hyper-connections count as norms. The table that chooses experts by token counts bytes, but no parameters.
    """
    sizes = shape.compressed
    assert sizes is not None  # noqa: S101 - the caller asked
    yield _matrix("embed", None, "embeddings", "vocabulary", shape.vocabulary, shape.hidden)
    mixed = (2 + sizes.streams) * sizes.streams
    for number, ratio in enumerate(sizes.ratios):
        at = f"layers.{number}."
        yield from _compressed(shape, f"{at}attn.", number, ratio)
        yield from _experts(shape, f"{at}ffn.", number)
        if number < sizes.hashed:
            table = 4 * shape.vocabulary * shape.experts_per_token  # 32-bit numbers of experts in vLLM
            yield ModuleWeight(f"{at}ffn.gate.tid2eid", number, "router", "copied", 0, table)
        else:
            yield _float32(f"{at}ffn.gate.bias", number, "router", shape.experts)
        yield _vector(f"{at}norms", number, "norms", 2 * shape.hidden)
        for part in ("attn", "ffn"):
            length = mixed * sizes.streams * shape.hidden + mixed + 3
            yield _float32(f"{at}hc_{part}", number, "norms", length)
    yield _vector("norm", None, "norms", shape.hidden)
    yield _float32("hc_head", None, "norms", sizes.streams * (sizes.streams * shape.hidden + 1) + 1)
    yield _matrix("head", None, "head", "vocabulary", shape.vocabulary, shape.hidden)


def _compressed(shape: Shape, at: str, number: int, ratio: int) -> Iterator[ModuleWeight]:
    """Yield the weights of an attention layer with ``ratio`` tokens in a compressed entry, 0 without entries."""
    sizes, query = shape.compressed, shape.heads * shape.head_dim
    assert sizes is not None  # noqa: S101 - the caller asked
    outputs = sizes.groups * sizes.output_rank
    yield _linear(f"{at}wq_a", number, "attention", "copied", sizes.query_rank, shape.hidden)
    yield _linear(f"{at}wq_b", number, "attention", "tensor", query, sizes.query_rank)
    yield _linear(f"{at}wkv", number, "attention", "copied", shape.head_dim, shape.hidden)
    yield _linear(f"{at}wo_a", number, "attention", "tensor", outputs, query // sizes.groups)
    yield _linear(f"{at}wo_b", number, "attention", "tensor", shape.hidden, outputs)
    yield _float32(f"{at}attn_sink", number, "attention", shape.heads, "tensor")
    yield _vector(f"{at}norms", number, "norms", sizes.query_rank + shape.head_dim)
    if ratio:
        yield from _compressor(shape, f"{at}compressor.", number, "attention", ratio, shape.head_dim)
    if ratio == OVERLAPPING and shape.indexer:
        heads, size = shape.indexer
        yield _linear(f"{at}indexer.wq_b", number, "indexer", "copied", heads * size, sizes.query_rank)
        yield _matrix(f"{at}indexer.weights_proj", number, "indexer", "copied", heads, shape.hidden)
        yield from _compressor(shape, f"{at}indexer.compressor.", number, "indexer", ratio, size)


def _compressor(shape: Shape, at: str, number: int, role: Role, ratio: int, size: int) -> Iterator[ModuleWeight]:
    """Yield the weights that compress ``ratio`` tokens to an entry of ``size``; vLLM never quantizes them."""
    width = size * (1 + (ratio == OVERLAPPING))
    yield _matrix(f"{at}wkv", number, role, "copied", width, shape.hidden)
    yield _matrix(f"{at}wgate", number, role, "copied", width, shape.hidden)
    yield _float32(f"{at}ape", number, role, ratio * width)
    yield _vector(f"{at}norm", number, "norms", size)


def _feed(
    shape: Shape, at: str, number: int, role: Role, split: Split, width: int, count: int = 1
) -> Iterator[ModuleWeight]:
    """Yield the matrices of a feed-forward layer of ``width``, or of ``count`` experts of that width.

    ``at`` is the prefix of their names, ``number`` the layer's number.
    """
    gate, up, down = ("w1", "w3", "w2") if shape.compressed else ("gate_proj", "up_proj", "down_proj")
    for name in (gate, up) if shape.gated else (up,):
        yield _linear(f"{at}{name}", number, role, split, count * width, shape.hidden)
    yield _linear(f"{at}{down}", number, role, split, count * shape.hidden, width)


def _experts(shape: Shape, prefix: str, number: int) -> Iterator[ModuleWeight]:
    count, width = shape.experts, shape.expert_intermediate
    yield from _feed(shape, f"{prefix}experts.0.", number, "experts", "experts", width, count)
    yield _matrix(f"{prefix}gate", number, "router", "copied", count, shape.hidden)
    if shape.text_type == "gpt_oss":
        yield _vector(f"{prefix}experts.biases", number, "experts", count * (2 * width + shape.hidden), "experts")
        yield _vector(f"{prefix}gate.bias", number, "router", count)
    if shared := shape.shared_intermediate:
        yield from _feed(shape, f"{prefix}shared_experts.", number, "shared-experts", "shared", shared)
        if "shared_expert_intermediate_size" in shape.fields:
            yield _vector(f"{prefix}shared_expert_gate", number, "router", shape.hidden)
    if shape.text_type in _CORRECTED:
        yield _float32(f"{prefix}gate.e_score_correction_bias", number, "router", count)  # in every checkpoint


def _linear(name: str, layer: int | None, role: Role, split: Split, rows: int, columns: int) -> ModuleWeight:
    return replace(_matrix(name, layer, role, split, rows, columns), linear=True)


def _matrix(name: str, layer: int | None, role: Role, split: Split, rows: int, columns: int) -> ModuleWeight:
    return ModuleWeight(name, layer, role, split, rows * columns, 2 * rows * columns, rows)


def _vector(name: str, layer: int | None, role: Role, length: int, split: Split = "copied") -> ModuleWeight:
    return ModuleWeight(name, layer, role, split, length, 2 * length)


def _float32(name: str, layer: int | None, role: Role, length: int, split: Split = "copied") -> ModuleWeight:
    return ModuleWeight(name, layer, role, split, length, 4 * length)


def _recurrent(shape: Shape, prefix: str, layer: int, kind: str) -> Iterator[ModuleWeight]:
    """Yield the weights of a layer with a recurrent state (gated delta net, Mamba), which ranks divide by heads."""
    sizes, hidden = shape.recurrent, shape.hidden
    assert sizes is not None  # noqa: S101 - a layer of this kind has them
    inner, groups = sizes.heads * sizes.head_dim, sizes.groups * sizes.state
    at = f"{prefix}linear_attn." if kind == "delta" else f"{prefix}mamba."
    if kind == "delta":
        yield _linear(f"{at}in_proj_qkvz", layer, "linear-attention", "tensor", 2 * groups + 2 * inner, hidden)
        yield _linear(f"{at}in_proj_ba", layer, "linear-attention", "tensor", 2 * sizes.heads, hidden)
        vectors = (2 * groups + inner) * sizes.kernel + 2 * sizes.heads + sizes.head_dim
    else:
        yield _linear(f"{at}in_proj", layer, "linear-attention", "tensor", 2 * inner + 2 * groups + sizes.heads, hidden)
        vectors = (inner + 2 * groups) * (sizes.kernel + 1) + 3 * sizes.heads + inner
    yield _linear(f"{at}out_proj", layer, "linear-attention", "tensor", hidden, inner)
    yield _vector(f"{at}vectors", layer, "linear-attention", vectors, "tensor")


def _encoder(config: Mapping[str, Any], text_hidden: int) -> Iterator[ModuleWeight]:
    """Yield a vision tower and its projector, with the sizes of a plain vision transformer.

    Each layer has four projections and two feed-forward matrices with biases, and two norms.
    """
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        # In configurations with embed_dim (Qwen2-VL), hidden_size is the language model's.
        hidden = integer(vision, "embed_dim", "hidden_size", "width") or 1152
        layers = integer(vision, "num_hidden_layers", "depth", "layers") or 24
        ratio = vision.get("mlp_ratio")
        width = int(ratio * hidden) if isinstance(ratio, int | float) else 4 * hidden
        width = integer(vision, "intermediate_size") or width
        patch = integer(vision, "patch_size") or 14
        patches = (integer(vision, "image_size") // patch) ** 2
        tower = layers * (4 * (hidden * hidden + hidden) + 2 * hidden * width + width + 5 * hidden)
        tower += hidden * (3 * patch * patch + patches + 3)
        yield ModuleWeight("visual", None, "encoder", "encoder", tower, 2 * tower)
        # Qwen merges patches before it projects them; some models do so after several layers.
        merged = hidden * (integer(vision, "spatial_merge_size") or 1) ** 2
        projector = merged * text_hidden + (merged > hidden) * merged * merged
        projector *= 1 + len(vision.get("deepstack_visual_indexes") or ())
        yield ModuleWeight("multi_modal_projector", None, "encoder", "encoder", projector, 2 * projector)


def measure_weights(tensors: Iterable[TensorInfo], *, layers: int) -> tuple[ModuleWeight, ...]:
    """Return the weights of a checkpoint by module; a layer's experts count as one.

    Names that match no pattern count as matrices that tensor parallelism divides. ``layers`` is the number of decoder
    layers; tensors of later ones belong to multi-token prediction. A packed tensor counts its stored elements.
    """
    weights: dict[tuple[str, Role, Split], ModuleWeight] = {}
    for info in tensors:
        name = _EXPERT.sub(".experts.0.", info.name)
        match = _LAYER.search(name)
        layer = int(match[1]) if match else None
        role, split = next((role, split) for pattern, role, split in _ROLES if re.search(pattern, name))
        if role in ("encoder", "mtp") or (layer is not None and layer >= layers):
            role, layer = "encoder" if role == "encoder" else "mtp", None
        module = name.rpartition(".")[0]
        weight = weights.get((module, role, split)) or ModuleWeight(module, layer, role, split, 0, 0)
        counted = 0 if _SCALES.search(name) else info.parameters
        matrix = counted and len(info.shape) >= 2 and role not in ("embeddings", "head", "router", "norms", "encoder")
        weights[module, role, split] = replace(
            weight,
            parameters=weight.parameters + counted,
            nbytes=weight.nbytes + info.nbytes,
            rows=weight.rows + (counted // info.shape[-1] if matrix else 0),
            linear=weight.linear or bool(matrix and not re.search(r"conv|\.compressor\.", name)),
        )
    return tuple(weights.values())
