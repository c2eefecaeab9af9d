"""Parameters of a model by arithmetic from its configuration: every matrix that a layer has, by name, size and use.

    >>> sum(piece.parameters for piece in count_pieces(config))
    8030261248

The formulas are the layers' own constructors in transformers 5.17; `tests/serving/model/test_counting.py` holds each
architecture against that library's model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.serving.model.architecture import Shape, read_shape
from pipeline.serving.model.encoder_counting import encoder_pieces
from pipeline.serving.model.parts import Piece, Role, Split
from pipeline.serving.model.recurrent_counting import recurrent_pieces

_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_5_vl_text", "qwen2_vl_text", "qwen2_vl", "qwen2_5_vl")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_next", "qwen3_5", "gemma3", "olmo2")
_CORRECTED = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe")
_FOUR_NORMS = ("gemma2", "gemma3", "olmo2", "glm4")


@dataclass(frozen=True, slots=True)
class Names:
    """Where the parts of the language model lie in a checkpoint: before ``layers``, and the output head."""

    body: str
    head: str


def names_of(config: Mapping[str, Any]) -> Names:
    """The prefixes that a checkpoint of this configuration has."""
    if not isinstance(config.get("text_config"), Mapping):
        return Names("model.", "lm_head")
    if str(config.get("model_type", "")).startswith("qwen"):
        return Names("model.language_model.", "lm_head")
    return Names("language_model.model.", "language_model.lm_head")


def count_pieces(config: Mapping[str, Any]) -> tuple[Piece, ...]:
    """Every weight of a model in 16 bit; a predictor of further tokens (MTP) and a vision tower have roles of their
    own. UserError where the configuration names no layers.
    """
    shape, names = read_shape(config), names_of(config)
    pieces = [_piece(f"{names.body}embed_tokens", None, "embeddings", "vocabulary", shape.vocabulary, shape.hidden)]
    for number, (kind, feed) in enumerate(zip(shape.kinds, shape.feeds, strict=True)):
        pieces += _layer(shape, f"{names.body}layers.{number}.", number, kind, feed)
    pieces.append(_vector(f"{names.body}norm", None, "norms", shape.hidden))
    if not shape.tied:
        pieces.append(_piece(names.head, None, "head", "vocabulary", shape.vocabulary, shape.hidden))
    pieces += _predictor(shape, names)
    pieces += encoder_pieces(config, shape.hidden)
    return tuple(pieces)


def _layer(shape: Shape, prefix: str, number: int, kind: str, feed: str) -> Iterator[Piece]:
    if kind in ("full", "sliding", "chunked"):
        yield from _latent(shape, prefix, number) if shape.latent else _attention(shape, prefix, number)
    elif kind != "none":
        yield from recurrent_pieces(shape, prefix, number, kind)
    if feed == "experts":
        yield from _experts(shape, f"{prefix}mlp.", number)
    elif feed == "dense":
        yield from _mlp(shape, f"{prefix}mlp.", number)
    norms = 4 if shape.model_type.startswith(_FOUR_NORMS) else (kind != "none") + (feed != "none")
    yield _vector(f"{prefix}norms", number, "norms", norms * shape.hidden)


def _attention(shape: Shape, prefix: str, number: int) -> Iterator[Piece]:
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # A gate of the attention's output comes out of the same projection as the queries.
    doubled = shape.model_type.startswith(("qwen3_next", "qwen3_5"))
    at = f"{prefix}self_attn."
    yield _linear(f"{at}q_proj", number, "attention", "tensor", query * (1 + doubled), shape.hidden)
    yield _linear(f"{at}k_proj", number, "attention", "kv", value, shape.hidden)
    yield _linear(f"{at}v_proj", number, "attention", "kv", value, shape.hidden)
    yield _linear(f"{at}o_proj", number, "attention", "tensor", shape.hidden, query)
    everywhere = bool(shape.fields.get("attention_bias"))
    output = everywhere and not shape.model_type.startswith(("glm4", "ernie"))
    biases = (query + 2 * value if everywhere or shape.model_type in _QKV_BIAS else 0) + output * shape.hidden
    norms = 2 * shape.head_dim * shape.model_type.startswith(_HEAD_NORMS)
    sinks = shape.heads * (shape.model_type == "gpt_oss")
    yield _vector(f"{at}vectors", number, "attention", biases + norms + sinks)


def _latent(shape: Shape, prefix: str, number: int) -> Iterator[Piece]:
    """Multi-head latent attention; every rank has a whole copy of what makes the latents."""
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
        # vLLM loads it without a quantization method, whatever the checkpoint declares.
        yield _piece(f"{at}indexer.weights_proj", number, "indexer", "copied", heads, shape.hidden)
        yield _vector(f"{at}indexer.k_norm", number, "norms", 2 * size)


def _mlp(shape: Shape, prefix: str, number: int) -> Iterator[Piece]:
    width = shape.shared_intermediate if not shape.experts and shape.shared_intermediate else shape.intermediate
    bias = bool(shape.fields.get("mlp_bias"))
    for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
        yield _linear(f"{prefix}{name}", number, "mlp", "tensor", width, shape.hidden)
    yield _linear(f"{prefix}down_proj", number, "mlp", "tensor", shape.hidden, width)
    if bias:
        yield _vector(f"{prefix}biases", number, "mlp", 2 * width + shape.hidden)


def _experts(shape: Shape, prefix: str, number: int) -> Iterator[Piece]:
    count, width = shape.experts, shape.expert_intermediate
    at = f"{prefix}experts.0."
    for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
        yield _linear(f"{at}{name}", number, "experts", "experts", count * width, shape.hidden)
    yield _linear(f"{at}down_proj", number, "experts", "experts", count * shape.hidden, width)
    yield _piece(f"{prefix}gate", number, "router", "copied", count, shape.hidden)
    if shape.model_type == "gpt_oss":
        yield _vector(f"{prefix}experts.biases", number, "experts", count * (2 * width + shape.hidden), "experts")
        yield _vector(f"{prefix}gate.bias", number, "router", count)
    if shape.shared_intermediate:
        at, width = f"{prefix}shared_experts.", shape.shared_intermediate
        for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
            yield _linear(f"{at}{name}", number, "shared-experts", "shared", width, shape.hidden)
        yield _linear(f"{at}down_proj", number, "shared-experts", "shared", shape.hidden, width)
    if "shared_expert_intermediate_size" in shape.fields and shape.shared_intermediate:
        yield _vector(f"{prefix}shared_expert_gate", number, "router", shape.hidden)
    if shape.model_type in _CORRECTED:
        # In float32, in every release.
        yield Piece(f"{prefix}gate.e_score_correction_bias", number, "router", "copied", count, 4 * count)


def _predictor(shape: Shape, names: Names) -> Iterator[Piece]:
    """Layers of multi-token prediction: a decoder layer each, and the projection of two hidden states into one."""
    feed = "experts" if shape.experts else "dense"
    for number in range(shape.mtp_layers):
        at = f"{names.body}layers.{len(shape.kinds) + number}."
        layer = (
            *_layer(shape, at, number, "full", feed),
            _linear(f"{at}eh_proj", None, "mtp", "copied", shape.hidden, 2 * shape.hidden),
            _vector(f"{at}enorm", None, "mtp", 3 * shape.hidden),
        )
        for piece in layer:
            yield _of_predictor(piece)


def _of_predictor(piece: Piece) -> Piece:
    return Piece(
        piece.name, None, "mtp", piece.split, piece.parameters, piece.nbytes, piece.rows, piece.linear, piece.scheme
    )


def _linear(name: str, layer: int | None, role: Role, split: Split, rows: int, columns: int) -> Piece:
    return Piece(name, layer, role, split, rows * columns, 2 * rows * columns, rows, linear=True)


def _piece(name: str, layer: int | None, role: Role, split: Split, rows: int, columns: int) -> Piece:
    return Piece(name, layer, role, split, rows * columns, 2 * rows * columns, rows)


def _vector(name: str, layer: int | None, role: Role, length: int, split: Split = "copied") -> Piece:
    return Piece(name, layer, role, split, length, 2 * length)
