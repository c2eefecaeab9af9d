"""Read the shape of a language model from its config.json, whose field names differ between architectures.

For fields that a configuration omits, this module has the defaults of its class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.modules import text_config

Mixer = Literal["full", "sliding", "chunked", "compressed", "delta", "mamba2", "none"]
"""How a layer mixes tokens: attention to all, to a window, to a chunk, to a window and compressed earlier tokens; a
gated delta net; Mamba-2; not at all."""

Feed = Literal["dense", "experts", "none"]

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "tie_word_embeddings": True, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
    },
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "qwen3": {"head_dim": 128},
    "nemotron_h": {"mamba_expand": 2},
    "deepseek_v4": {"num_hash_layers": 3, "hc_mult": 4, "qk_rope_head_dim": 64},
}  # fmt: skip
"""Defaults of fields that configurations of these models often omit (transformers 5.17 configuration classes)."""

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "top_k")
_ATTENTION_KINDS: Mapping[str, Mixer] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked",
    "linear_attention": "delta", "mamba": "mamba2", "mamba2": "mamba2", "mlp": "none", "moe": "none",
}  # fmt: skip

_MARKS: Mapping[str, Mixer] = {"M": "mamba2", "*": "full"}
_FEEDS: Mapping[str, Feed] = {"E": "experts", "-": "dense"}
"""Letters of Nemotron-H's layer pattern; its layers either mix tokens or feed forward."""

OVERLAPPING = 4
"""Tokens of an entry that overlaps with the one before it: DeepSeek V4's compressed sparse attention (CSA)."""
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": OVERLAPPING, "heavily_compressed_attention": 128}

_UNPLANNED = ("jamba", "mamba", "falcon_mamba", "mamba2")

_BLOCKS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E"}


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention (MLA), in elements.

    ``rank`` is the size of a cached latent, ``query_rank`` the size of the queries' latent, None without one; ``rope``,
    ``nope`` and ``value`` are sizes of a head: the rotary and the other part of keys, and values.
    """

    query_rank: int | None
    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, slots=True)
class CompressedSizes:
    """Sizes of DeepSeek V4's attention, whose layers attend to a window and to compressed entries of earlier tokens.

    ``query_rank`` is the size of the queries' latent; outputs are projected to ``output_rank`` in each of ``groups``
    groups of heads. ``ratios`` has the tokens of a compressed entry in each layer, 0 where a layer has the window only;
    at `OVERLAPPING` tokens, entries overlap and an indexer chooses among them. ``streams`` is the number of residual
    streams (hyper-connections), ``hashed`` that of the first layers, whose experts a table chooses by token.
    """

    query_rank: int
    output_rank: int
    groups: int
    ratios: tuple[int, ...]
    streams: int
    hashed: int


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Sizes of a layer with a recurrent state: heads, elements of a head, groups (for delta nets, key heads)."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a language model; sizes are in elements, of one layer or head.

    ``text_type`` is its model_type, ``fields`` its configuration with defaults filled in. ``kinds`` and ``feeds`` have
    one entry for each layer. ``experts`` is 0 for a dense model; ``tied`` means that embeddings and output head are
    one.
    """

    text_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    kinds: tuple[Mixer, ...] = field(repr=False, compare=False)
    feeds: tuple[Feed, ...] = field(repr=False, compare=False)
    window: int | None
    chunk: int | None
    intermediate: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    shared_experts: int
    latent: LatentSizes | None
    compressed: CompressedSizes | None
    indexer: tuple[int, int] | None
    recurrent: RecurrentSizes | None
    tied: bool
    fields: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with routed experts."""
        return tuple(number for number, feed in enumerate(self.feeds) if feed == "experts")

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers have a gate projection; Nemotron's squared ReLU has none."""
        return self.text_type not in ("nemotron", "nemotron_h")


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a parsed config.json.

    Raises `UserError` for Mamba-1 models, and without layers or hidden size.
    """
    declared = dict(text_config(config))
    model_type = str(declared.get("model_type") or config.get("model_type") or "")
    if model_type in _UNPLANNED:
        raise UserError(
            f"config.json of a {model_type} model: serving Mamba-1 models, and pure Mamba models, is not supported."
        )
    defaults = _DEFAULTS.get(model_type, {})
    text = {**defaults, **{key: value for key, value in declared.items() if value is not None}}
    if isinstance(config.get("tie_word_embeddings"), bool):  # the outer model's value wins over its text part's
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    hidden = integer(text, "hidden_size", "n_embd")
    layers = integer(text, "num_hidden_layers", "n_layer") or len(_blocks(text))
    if layers < 1 or hidden < 1:
        raise UserError(
            f"config.json of a {model_type or 'nameless'} model: found num_hidden_layers {layers} and hidden_size "
            f"{hidden}, expected both above zero."
        )
    heads = integer(text, "num_attention_heads", "n_head")
    experts, moe_size = integer(text, *_EXPERTS), integer(text, "moe_intermediate_size", "intermediate_size")
    shared_experts, shared = _shared(text, model_type, moe_size, experts)
    routed = ("E" if experts > 0 and _routed(text, model_type, number) else "-" for number in range(layers))
    feeds = tuple(_FEEDS.get(mark, "none") for mark in _blocks(text) or routed)[:layers]
    compressed = _compressed(text, layers) if model_type == "deepseek_v4" else None
    kinds = _kinds(text, model_type, layers)
    if compressed:
        kinds = tuple("compressed" if ratio else "sliding" for ratio in compressed.ratios)
    wide = integer(text, "intermediate_size_mlp", "intermediate_size", "n_inner") or 4 * hidden
    return Shape(
        text_type=model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=integer(text, "num_key_value_heads") or heads,
        head_dim=integer(text, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0),
        vocabulary=integer(text, "vocab_size"),
        kinds=kinds,
        feeds=feeds,
        window=integer(text, "sliding_window") or None if {"sliding", "compressed"} & set(kinds) else None,
        chunk=integer(text, "attention_chunk_size") or None if "chunked" in kinds else None,
        intermediate=wide if "dense" in feeds else 0,
        experts=experts,
        experts_per_token=integer(text, *_TOP_K) if experts else 0,
        expert_intermediate=moe_size if experts else 0,
        shared_intermediate=shared,
        shared_experts=shared_experts if experts else 0,
        latent=_latent(text),
        compressed=compressed,
        indexer=(integer(text, "index_n_heads"), integer(text, "index_head_dim")) if text.get("index_topk") else None,
        recurrent=_recurrent(text, hidden) if {"delta", "mamba2"} & set(kinds) else None,
        tied=bool(text.get("tie_word_embeddings", False)),
        fields=text,
    )


def integer(text: Mapping[str, Any], *names: str) -> int:
    """Return the first of the fields ``names`` that is a number, 0 if none is.

    Of a list by layer, its first element.
    """
    for name in names:
        value = text.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    return 0


def _shared(text: Mapping[str, Any], model_type: str, moe_size: int, experts: int) -> tuple[int, int]:
    """Return the number of shared experts, which every token visits, and their total width."""
    if model_type.startswith("llama4"):
        return (1, moe_size) if experts else (0, 0)
    width = integer(text, "shared_expert_intermediate_size", "shared_intermediate_size")
    width = width or integer(text, "moe_shared_expert_intermediate_size")
    count = integer(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return (count or int(width > 0), width or count * moe_size)


def _latent(text: Mapping[str, Any]) -> LatentSizes | None:
    rank = integer(text, "kv_lora_rank")
    if not rank:
        return None
    sizes = [integer(text, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
    return LatentSizes(integer(text, "q_lora_rank") or None, rank, *sizes)


def _compressed(text: Mapping[str, Any], layers: int) -> CompressedSizes:
    """Return the sizes of DeepSeek V4, whose release lists ratios, and whose transformers class lists layer types."""
    ratios, named, feeds = text.get("compress_ratios"), text.get("layer_types"), text.get("mlp_layer_types")
    if isinstance(named, list):
        rates = {**_RATIOS, **(text.get("compress_rates") or {})}
        ratios = [integer(rates, str(name)) for name in named]
    elif not isinstance(ratios, list):  # DeepSeek-V4-Pro's, the default of the class
        ratios = [OVERLAPPING if number > 1 and number % 2 else 128 for number in range(layers)]
    return CompressedSizes(
        query_rank=integer(text, "q_lora_rank"),
        output_rank=integer(text, "o_lora_rank"),
        groups=integer(text, "o_groups") or 1,
        ratios=tuple(int(ratio) for ratio in ratios[:layers]),
        streams=integer(text, "hc_mult") or 1,
        hashed=feeds.count("hash_moe") if isinstance(feeds, list) else integer(text, "num_hash_layers"),
    )


def _recurrent(text: Mapping[str, Any], hidden: int) -> RecurrentSizes:
    if "linear_num_value_heads" in text:
        return RecurrentSizes(
            heads=integer(text, "linear_num_value_heads"),
            head_dim=integer(text, "linear_value_head_dim"),
            groups=integer(text, "linear_num_key_heads"),
            state=integer(text, "linear_key_head_dim"),
            kernel=integer(text, "linear_conv_kernel_dim"),
        )
    inner = int(hidden * float(text.get("mamba_expand") or text.get("expand") or 2))
    heads = integer(text, "mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = integer(text, "mamba_d_head", "mamba_head_dim") or (inner // heads if heads else 1)
    return RecurrentSizes(
        heads=heads,
        head_dim=head_dim,
        groups=integer(text, "mamba_n_groups", "n_groups") or 1,
        state=integer(text, "mamba_d_state", "ssm_state_size", "state_size") or 16,
        kernel=integer(text, "mamba_d_conv", "conv_kernel") or 4,
    )


def _kinds(text: Mapping[str, Any], model_type: str, layers: int) -> tuple[Mixer, ...]:
    kinds: tuple[Mixer, Mixer]
    if marks := _blocks(text):
        return tuple(_MARKS.get(mark, "none") for mark in marks[:layers])
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list):
        return tuple(_ATTENTION_KINDS.get(str(name), "full") for name in named[:layers])
    if model_type.startswith("llama4"):
        # A layer without rotary embedding (0) attends to all tokens; by default it is every fourth.
        rope = text.get("no_rope_layers") or [int((number + 1) % 4 != 0) for number in range(layers)]
        kinds = ("full", "chunked")
        return tuple(kinds[bool(rope[number])] for number in range(layers))
    default: Mixer = "delta"
    every = integer(text, "full_attention_interval")
    if not every and text.get("sliding_window") and text.get("use_sliding_window") is not False:
        default = "sliding"
        every = 2 if model_type == "gpt_oss" else integer(text, "sliding_window_pattern", "_sliding_window_pattern")
    elif not every:
        default = "full"
    kinds = (default, "full")
    return tuple(kinds[every > 0 and (number + 1) % every == 0] for number in range(layers))


def _blocks(text: Mapping[str, Any]) -> str:
    """Return Nemotron-H's layer pattern, one letter for each layer (M, *, E or -); empty for other models."""
    named = text.get("layers_block_type")
    if isinstance(named, list) and text.get("model_type") == "nemotron_h":
        return "".join(_BLOCKS.get(str(name), "-") for name in named)
    return str(text.get("hybrid_override_pattern") or "")


def _routed(text: Mapping[str, Any], model_type: str, number: int) -> bool:
    if model_type.startswith("llama4"):
        listed = text.get("moe_layers")
        step = integer(text, "interleave_moe_layer_step") or 1
        return number in listed if isinstance(listed, list) else (number + 1) % step == 0
    if number in (text.get("mlp_only_layers") or ()):
        return False
    if number < integer(text, "first_k_dense_replace", "moe_layer_start_index"):
        return False
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[number])
    if isinstance(frequency, int):
        return number % max(1, frequency) == 0
    return (number + 1) % (integer(text, "decoder_sparse_step") or 1) == 0
