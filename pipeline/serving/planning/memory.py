"""Whether a model fits: bytes of the fullest accelerator, and the tokens of the KV cache that is left.

Arithmetic in vLLM's own order: weights divided among ranks and layers among stages; what the profiling run finds at its
peak, which is once ``max_num_batched_tokens`` dummy tokens and then ``max_num_seqs`` rows of logits (vLLM 0.26
v1/worker/gpu_worker.py, determine_available_memory); graphs, which vLLM counts since 0.21; and the cache in what is
left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.model.weights import Piece
from quantmint.pipeline.serving.plan import Layout, Memory

_VOCABULARY_STEP = 64  # rows are padded to it (vLLM 0.26 layers/vocab_parallel_embedding.py)
_MXFP4_STEPS = {"rocm": (256, 256), "cuda": (1, 64), "cpu": (32, 32)}
"""Hidden and intermediate sizes of MXFP4 experts are padded to these for the kernels of gpt-oss
(vLLM 0.32 layers/fused_moe/oracle/mxfp4.py: AITER and Triton on ROCm, Triton on Hopper, the CPU's)."""

_MIB, _GIB = 1 << 20, 1 << 30
_SAMPLER_BYTES = 6
"""Bytes of one logit in the sampler: 2 as computed and 4 in float32. On an NVIDIA H100 (vLLM 0.26, 1,024 rows of
128,256 logits) no more was to be seen."""

_OUTSIDE: dict[str, int] = {"cuda": 300 * _MIB, "rocm": 600 * _MIB, "cpu": 0}
"""What is loaded outside PyTorch's allocator while profiling: kernels, workspaces of the matrix libraries. quantmint's
estimate; the context itself was there before vLLM took its first look."""
_COMMUNICATION: dict[str, int] = {"cuda": _GIB // 4, "rocm": 3 * _GIB // 2, "cpu": 0}
"""Buffers of NCCL or RCCL and of the custom all-reduce, where an engine has several ranks. Two NVIDIA H200 took less
than 0.2 GiB with vLLM 0.26; RCCL's, with 112 channels, is quantmint's estimate."""
_ENCODER_PEAK = 1 * _GIB
"""A vision tower's profile with its largest image, and the cache of its outputs. quantmint's estimate."""

_LATENT_CHUNK = 64 << 10
"""Tokens of cached latents that a prefill expands at a time (vLLM 0.26 layers/attention/mla_attention.py)."""

_GRAPHS_PER_LAYER = 64 << 10
_FIRST_CAPTURE = 200 * _MIB
"""Nodes of one captured graph by layer, and the pool that the largest one opens. quantmint's estimate."""

_STATES_CACHED = (0, 26)
"""Prefixes of models with recurrent states are cached by default since 0.26, which takes a second state a request."""
_IN_FLIGHT = (0, 26)
"""A window counts the tokens of all concurrent batches since 0.26; of one before."""


def kv_bytes_per_token(facts: ModelFacts, tensor_parallel: int, kv_cache_dtype: str, *, kind: str = "cuda") -> int:
    """Bytes that one more token takes in the cache of one accelerator, in all layers that keep every token; where none
    does, in those with a window.

    ``kv_cache_dtype`` is "auto" for 16 bit, starts with "fp8" for 8, or is "float32".
    """
    layers = tuple(_caches(facts, tensor_parallel, kv_cache_dtype, kind))
    kept = [cache for cache in layers if cache.kind == "full"] or [cache for cache in layers if cache.kind == "sliding"]
    return sum(cache.nbytes + cache.extra for cache in kept)


def fit(
    facts: ModelFacts,
    hardware: Hardware,
    layout: Layout,
    *,
    hbm_bytes: int | None,
    utilization: float,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_dtype: str,
    block_size: int | None = None,
    cudagraph_mode: str | None = None,
    version: str = "0.33.0",
    cpu_kv_bytes: int | None = None,
) -> Memory:
    """The memory of the fullest accelerator of a server; ``kv_cache`` is zero or less where the model does not fit.

    ``hbm_bytes`` stands in for the hardware's own. On a CPU the cache is ``cpu_kv_bytes`` (VLLM_CPU_KVCACHE_SPACE) and
    the total is the process's. ``cudagraph_mode`` None is eager. UserError where the accelerator's memory is unknown.
    """
    kind, numbers = hardware.kind, parse_version(version)
    caches = tuple(_caches(facts, layout.tensor, kv_cache_dtype, kind))
    if not block_size:  # vLLM's own (0.32 platforms/cpu.py, v1/attention/backends/mla)
        latent = facts.latent is not None
        block_size = (16 if latent else 128) if kind == "cpu" else 64 if latent and kind == "cuda" else 16
    groups = cache_groups(caches, block_size=block_size)
    total = cpu_kv_bytes if kind == "cpu" else (hbm_bytes or hardware.hbm_bytes)
    if total is None:
        raise UserError(f"the memory of {hardware.title} is not known: expected hbm_bytes, or cpu_kv_bytes for a CPU.")
    activations = _profile_peak(facts, layout, kind, max_num_batched_tokens, max_num_seqs, max_model_len, block_size)
    graphs = graph_bytes(facts, None if kind == "cpu" else cudagraph_mode, max_num_seqs)
    budget = total if kind == "cpu" else int(total * utilization)
    found = []
    for number, layers in enumerate(stages(facts.layers, layout.pipeline)):
        weights = stage_bytes(facts, layout, number, kind=kind)
        free = budget if kind == "cpu" else budget - weights - activations - graphs
        block = groups.block_bytes(layers)
        found.append((free // block if block else free, free, weights))
    blocks, free, weights = min(found)  # the tightest stage
    # Batches that may be scheduled at the same time: one a stage, and one ahead where there is one stage.
    batches = max(2, layout.pipeline) if numbers >= _IN_FLIGHT else 1
    in_flight = batches * max_num_batched_tokens
    request = groups.blocks_of_request(max_model_len, in_flight, states=1 + (numbers >= _STATES_CACHED))
    concurrency = max(0.0, blocks / request) if request else float(max_num_seqs)
    if kind == "cpu":
        total = budget = total + weights + activations
    return Memory(
        total=total,
        budget=budget,
        weights=weights,
        activations=activations,
        graphs=graphs,
        kv_cache=free,
        kv_bytes_per_token=kv_bytes_per_token(facts, layout.tensor, kv_cache_dtype, kind=kind),
        kv_tokens=int(concurrency * max_model_len),  # as vLLM logs the size of the cache since 0.21
        concurrency=concurrency,
    )


def _caches(facts: ModelFacts, tensor: int, dtype: str, kind: str) -> Iterator[LayerCache]:
    item = 1 if dtype.startswith("fp8") else 4 if dtype == "float32" else 2
    token = 2 * max(1, facts.kv_heads // tensor) * facts.head_dim * item
    extra = 0
    if facts.latent:
        # One latent for all heads, a copy on every rank.
        token = (facts.latent.rank + facts.latent.rope) * item
        if facts.indexer:
            if item == 1 and kind == "cuda":
                token = 656  # fp8_ds_mla: latents in 8 bit, their scales, the rotary part in 16 (flashmla_sparse.py)
            # Keys of the indexer: FP8, and a float32 scale for every 128 of them (deepseek_v2.py).
            extra = facts.indexer[1] + facts.indexer[1] // 128 * 4
    for number, mixer in enumerate(facts.kinds):
        if mixer == "sliding" and facts.window:
            yield LayerCache(number, "sliding", token, facts.window)
        elif mixer in ("full", "chunked", "sliding"):
            # Chunks keep every token: vLLM turns its hybrid manager off for them (vllm/config/vllm.py).
            yield LayerCache(number, "full", token, extra=extra)
        elif mixer != "none":
            yield LayerCache(number, "state", _state_bytes(facts, mixer, tensor, kind))


def _state_bytes(facts: ModelFacts, mixer: str, tensor: int, kind: str) -> int:
    """One request's state in one layer: the convolution's last inputs, and the recurrent state (mamba_utils.py).

    The recurrent state is in 16 bit but where the configuration asks for float32, in Nemotron-H (models/config.py),
    and on CPUs, whose AVX-512 kernels want it so (platforms/cpu.py; vLLM 0.32).
    """
    sizes = facts.recurrent
    assert sizes is not None  # noqa: S101 - a layer of this kind has them
    fields = facts.fields
    asked = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
    wide = kind == "cpu" or (asked or ("float32" if facts.text_type == "nemotron_h" else "auto")) == "float32"
    inner, item = sizes.heads * sizes.head_dim, 4 if wide else 2
    groups = math.ceil(sizes.groups / tensor) * tensor if mixer == "mamba2" else sizes.groups
    channels = inner + 2 * groups * sizes.state
    return -(-channels // tensor) * (sizes.kernel - 1) * 2 + -(-inner // tensor) * sizes.state * item


def stages(layers: int, count: int) -> tuple[range, ...]:
    """The layers of each pipeline stage; what is over goes to those before the last (vLLM 0.26, get_pp_indices)."""
    sizes = [layers // count] * count
    for number in range(layers % count):
        sizes[-(number + 2) if count > 1 else 0] += 1
    starts = [sum(sizes[:number]) for number in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_bytes(facts: ModelFacts, layout: Layout, stage: int = 0, *, kind: str = "rocm") -> int:
    """Bytes of weights on one rank of a stage, the fullest.

    Embeddings and the vision tower are in the first stage, the output head and tied embeddings in the last; a predictor
    of further tokens (MTP) is left out. Latent attention keeps its up-projections a second time, in 16 bit, to fold
    them into queries and outputs (vLLM 0.32 layers/attention/mla_attention.py, process_weights_after_loading).
    """
    layers = stages(facts.layers, layout.pipeline)[stage]
    last = stage == layout.pipeline - 1
    tied = facts.tied
    total = 0.0
    for piece in facts.pieces:
        if piece.layer is not None:
            here = piece.layer in layers
        elif piece.role == "mtp":
            here = False
        elif piece.role in ("embeddings", "encoder"):
            here = stage == 0 or (last and tied and piece.role == "embeddings")
        else:
            here = last
        if here:
            total += piece.nbytes * _share(piece, facts, layout, kind)
    if latent := facts.latent:
        folded = facts.heads * (latent.nope + latent.value) * latent.rank
        total += len(layers) * 2 * folded / layout.tensor
    return round(total)


def _share(piece: Piece, facts: ModelFacts, layout: Layout, kind: str) -> float:
    """The part of a piece's bytes that the fullest rank holds; more than 1 where padding adds to it."""
    tensor, ranks = layout.tensor, layout.tensor * layout.data
    if piece.split == "tensor":
        return 1 / tensor
    if piece.split == "kv":
        return 1 / min(tensor, max(1, facts.kv_heads))
    if piece.split == "vocabulary":
        padded = -(-facts.vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        return padded / max(1, facts.vocabulary) / tensor
    if piece.split == "experts":
        whole = -(-facts.experts // ranks) / facts.experts if layout.expert else 1 / ranks
        if not facts.gpt_oss or facts.quantization != "mxfp4":
            return whole
        hidden, intermediate = _MXFP4_STEPS[kind]
        width = facts.expert_intermediate / (1 if layout.expert else ranks)
        grown = (-(-facts.hidden // hidden) * hidden / facts.hidden) * (-(-width // intermediate) * intermediate)
        return whole * grown / width
    if piece.split == "shared":
        # With tokens sharded over the ranks of an engine, each needs the whole of what every token visits.
        return 1.0 if layout.expert and layout.data > 1 and tensor > 1 else 1 / tensor
    return 1.0


def _profile_peak(
    facts: ModelFacts, layout: Layout, kind: str, tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> int:
    """Bytes that one accelerator needs beside weights, graphs and cache, for a step of ``tokens``."""
    hidden = 2 * tokens * facts.hidden
    attention = _attention(facts, layout, tokens)
    if latent := facts.latent:
        # Keys and values of every head for a chunk of cached latents, allocated as if in a prefill:
        # 8 requests of full length or 4 blocks a request, at most 64k tokens, at least a block a request.
        chunk = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), _LATENT_CHUNK)
        cached = max(chunk, max_num_seqs * block_size)
        attention += 2 * cached * -(-facts.heads // layout.tensor) * (latent.nope + latent.value)
    # Gate and up of all tokens in one tensor, and their product.
    dense = 2 * tokens * 3 * max(facts.intermediate, facts.shared_intermediate) // layout.tensor
    # The experts' workspaces stay allocated from one layer to the next.
    body = hidden * 2 + max(attention, dense) + _mixture(facts, layout, tokens)
    rows = min(max_num_seqs, tokens)
    sampler = hidden + rows * facts.vocabulary * _SAMPLER_BYTES
    outside = _OUTSIDE[kind] + (_COMMUNICATION[kind] if layout.gpus > 1 else 0)
    # One table of sines and cosines for all layers: [context, rotated elements] in 16 bit.
    rope = 2 * facts.context * (latent.rope if latent else facts.head_dim)
    return max(body, sampler) + outside + rope + (_ENCODER_PEAK if facts.multimodal else 0)


def graph_bytes(facts: ModelFacts, cudagraph_mode: str | None, max_num_seqs: int) -> int:
    """Bytes of captured graphs; None and NONE capture nothing.

    Sizes are 1, 2, 4, then every 8th up to 256 and every 16th up to 512 tokens, at most twice ``max_num_seqs``
    (vLLM 0.26 vllm/config/vllm.py). A mode of two parts captures two sets that share a pool.
    """
    mode = (cudagraph_mode or "NONE").upper()
    if mode == "NONE":
        return 0
    largest = min(512, 2 * max_num_seqs)
    sizes = 3 + len(range(8, min(largest, 255) + 1, 8)) + len(range(256, largest + 1, 16))
    sets = 2 if mode == "FULL_AND_PIECEWISE" else 1
    each = max(_MIB, facts.layers * _GRAPHS_PER_LAYER)
    return _FIRST_CAPTURE + sets * (sizes - 1) * each


def _attention(facts: ModelFacts, layout: Layout, tokens: int) -> int:
    """Queries, keys and values of all tokens, and the output, in 16 bit; of MLA the latents. Nothing attends yet."""
    latent, heads = facts.latent, -(-facts.heads // layout.tensor)
    if latent:
        width = heads * (latent.nope + latent.rope + latent.value) + latent.rank + latent.rope
        return 2 * tokens * (width + (latent.query_rank or 0))
    return 2 * tokens * facts.head_dim * (2 * heads + 2 * max(1, facts.kv_heads // layout.tensor))


def _mixture(facts: ModelFacts, layout: Layout, tokens: int) -> int:
    """The two workspaces of the fused experts and the router's logits in float32.

    Shapes are [tokens, top k, max(intermediate, hidden)] and [tokens, top k, max(2 intermediate, hidden)] (vLLM 0.26
    model_executor/layers/fused_moe/experts/triton_moe.py). Ranks of data parallelism gather each other's tokens.
    """
    if not facts.experts:
        return 0
    gathered = tokens * layout.data
    width = facts.expert_intermediate
    if not layout.expert:
        width = -(-width // (layout.tensor * layout.data))
    elements = max(width, facts.hidden) + max(2 * width, facts.hidden)
    return 2 * gathered * facts.experts_per_token * elements + 4 * gathered * facts.experts


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps, in pages; a page holds a block of tokens, or one state. vLLM wants all pages equally large,
    puts layers of one kind into groups of equally many layers, and gives a request blocks of each group (vLLM 0.32
    v1/core/kv_cache_utils.py and v1/kv_cache_interface.py).

    ``nbytes`` are those of a token, or of a whole state, ``extra`` those of a token in a second cache.
    """

    layer: int
    kind: Literal["full", "sliding", "state"]
    nbytes: int
    window: int = 0
    extra: int = 0


class Group(NamedTuple):
    """Layers that share a block table; ``block`` is tokens of a block, 0 for states."""

    kind: Literal["full", "sliding", "state"]
    layers: tuple[int, ...]
    block: int
    window: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """``page`` is the bytes of one layer's page, the same in all groups."""

    groups: tuple[Group, ...]
    page: int

    def block_bytes(self, layers: range) -> int:
        """Bytes of one block in a pipeline stage with these layers: the widest group's."""
        return self.page * max((sum(n in layers for n in group.layers) for group in self.groups), default=0)

    def blocks_of_request(self, tokens: int, in_flight: int, *, states: int = 1) -> int:
        """Blocks that a request of so many tokens takes at most.

        ``in_flight`` tokens may be scheduled and not yet settled: a window keeps their blocks so long. ``states`` is
        how many states a request has; prefix caching needs a second one.
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += states
            elif group.kind == "sliding":
                # One more, because a window need not start where a block does.
                total += math.ceil(min(group.window - 1 + in_flight, tokens) / group.block) + 1
            else:
                total += math.ceil(tokens / group.block)
        return total


def cache_groups(layers: Sequence[LayerCache], *, block_size: int) -> CacheGroups:
    """Group the layers of a whole model. Without layers there are no groups."""
    attending = [cache for cache in layers if cache.kind != "state"]
    states = [cache for cache in layers if cache.kind == "state"]
    largest = max((cache.nbytes for cache in attending if cache.kind == "full"), default=0)
    largest = largest or max((cache.nbytes for cache in attending), default=0)
    if states and largest:
        # A block of attention must be as large as a state; it grows in steps of the block size.
        block_size *= math.ceil(max(cache.nbytes for cache in states) / (block_size * largest))
    page = max(block_size * largest, max((cache.nbytes for cache in states), default=0))
    if {cache.kind for cache in layers} == {"full"}:
        # All of one kind, of whatever size, are one group: its pages lie side by side.
        mean = sum(cache.nbytes + cache.extra for cache in attending) / len(attending)
        return CacheGroups(
            (Group("full", tuple(cache.layer for cache in attending), block_size, 0),), round(mean * block_size)
        )
    buckets: dict[tuple[Literal["full", "sliding", "state"], int, int], list[int]] = {}
    for cache in layers:
        block = 0 if cache.kind == "state" else page // cache.nbytes
        buckets.setdefault((cache.kind, cache.window, block), []).append(cache.layer)
    fewest, most = min(map(len, buckets.values()), default=0), max(map(len, buckets.values()), default=0)
    # vLLM's heuristic against padding where two kinds have nearly as many layers.
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for (kind, window, block), numbers in buckets.items():
        count = math.ceil(len(numbers) / size)
        groups += [Group(kind, tuple(numbers[start::count]), block, window) for start in range(count)]
    return CacheGroups(tuple(groups), page)
