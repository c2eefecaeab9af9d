"""The memory of a launch: bytes on the fullest accelerator, and the tokens that its KV cache then holds.

The order is vLLM's: weights divided among ranks, layers among pipeline stages; the peak of the profiling run, which
computes ``max_num_batched_tokens`` dummy tokens and then ``max_num_seqs`` rows of logits (vLLM 0.26
v1/worker/gpu_worker.py, determine_available_memory); captured graphs, which vLLM counts since 0.21; the rest is cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.model.weights import ModuleWeight
from quantmint.pipeline.serving.plan import Memory, ParallelLayout
from quantmint.pipeline.serving.planning.kv_cache import (
    default_block_size,
    groups_of_model,
    kv_bytes_per_token,
)

_VOCABULARY_STEP = 64  # rows are padded to a multiple (vLLM 0.26 layers/vocab_parallel_embedding.py)
_MXFP4_STEPS = {"rocm": (256, 256), "cuda": (1, 64), "cpu": (32, 32)}
"""Multiples to which hidden and intermediate size of MXFP4 experts are padded for the kernels of gpt-oss
(vLLM 0.32 layers/fused_moe/oracle/mxfp4.py: AITER and Triton on ROCm, Triton on Hopper, the CPU's)."""

_MIB, _GIB = 1 << 20, 1 << 30
_SAMPLER_BYTES = 6
"""Bytes of one logit in the sampler: 2 as computed and 4 in float32. An NVIDIA H100 (vLLM 0.26, 1,024 rows of
128,256 logits) showed no more."""

_OUTSIDE: dict[str, int] = {"cuda": 300 * _MIB, "rocm": 600 * _MIB, "cpu": 0}
"""Bytes that profiling loads outside PyTorch's allocator: kernels, workspaces of the matrix libraries. quantmint's
estimate. The context itself is allocated before vLLM's first look at the memory."""
_COMMUNICATION: dict[str, int] = {"cuda": _GIB // 4, "rocm": 3 * _GIB // 2, "cpu": 0}
"""Buffers of NCCL or RCCL and of the custom all-reduce in an engine with several ranks. Two NVIDIA H200 took less
than 0.2 GiB with vLLM 0.26; RCCL's, with 112 channels, is quantmint's estimate."""
_ENCODER_PEAK = 1 * _GIB
"""A vision tower's profiling run with its largest image, and the cache of its outputs. quantmint's estimate."""

_LATENT_CHUNK = 64 << 10
"""Tokens of cached latents that a prefill expands at a time (vLLM 0.26 layers/attention/mla_attention.py)."""

_GRAPHS_PER_LAYER = 64 << 10
_FIRST_CAPTURE = 200 * _MIB
"""Bytes of one captured graph's nodes for each layer, and of the pool that the largest graph opens. quantmint's
estimate."""

_STATES_CACHED = (0, 26)
"""First vLLM that caches prefixes of models with recurrent states by default, which takes a second state a request."""
_BATCHES_COUNTED = (0, 26)
"""First vLLM that reserves a sliding window's blocks for the tokens of all concurrent batches instead of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of a vLLM engine that its memory depends on.

    ``utilization`` is the share of the accelerator that vLLM may take, ``max_model_len`` and ``block_size`` are in
    tokens; ``block_size`` None takes vLLM's default, ``cudagraph_mode`` None runs eagerly. ``kv_cache_dtype`` is
    "auto" for 16 bit, starts with "fp8" for 8, or is "float32". ``cpu_kv_bytes`` is the cache of a CPU
    (VLLM_CPU_KVCACHE_SPACE).
    """

    vllm_version: str
    utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    cudagraph_mode: str | None = None
    cpu_kv_bytes: int | None = None


def estimate_memory(
    facts: ModelFacts,
    hardware: Hardware,
    layout: ParallelLayout,
    engine: EngineSettings,
    *,
    hbm_bytes: int | None = None,
) -> Memory:
    """Return the memory of a server's fullest accelerator; ``kv_cache`` is zero or less if the model does not fit.

    ``hbm_bytes`` replaces the hardware table's figure. On a CPU the result describes the process. Raises `UserError`
    when the memory of the accelerator is unknown.
    """
    kind, version, dtype = hardware.kind, parse_version(engine.vllm_version), engine.kv_cache_dtype
    block_size = engine.block_size or default_block_size(facts, kind)
    groups = groups_of_model(facts, layout.tensor, dtype, kind, block_size)
    total = engine.cpu_kv_bytes if kind == "cpu" else (hbm_bytes or hardware.hbm_bytes)
    if total is None:
        raise UserError(f"the memory of {hardware.title} is not known: expected hbm_bytes, or cpu_kv_bytes for a CPU.")
    activations = _profile_peak(facts, layout, kind, engine, block_size)
    graphs = graph_bytes(facts, None if kind == "cpu" else engine.cudagraph_mode, engine.max_num_seqs)
    budget = total if kind == "cpu" else int(total * engine.utilization)
    stage_room = []
    for number, layers in enumerate(stages(facts.layers, layout.pipeline)):
        weights = stage_bytes(facts, layout, number, kind=kind)
        free = budget if kind == "cpu" else budget - weights - activations - graphs
        block = groups.block_bytes(layers)
        stage_room.append((free // block if block else free, free, weights))
    blocks, free, weights = min(stage_room)  # the tightest stage
    # Batches that may be scheduled at the same time: one a stage, and one ahead if there is a single stage.
    batches = max(2, layout.pipeline) if version >= _BATCHES_COUNTED else 1
    in_flight = batches * engine.max_num_batched_tokens
    states = 1 + (version >= _STATES_CACHED)
    blocks_per_request = groups.blocks_of_request(engine.max_model_len, in_flight, states=states)
    concurrency = max(0.0, blocks / blocks_per_request) if blocks_per_request else float(engine.max_num_seqs)
    if kind == "cpu":
        total = budget = total + weights + activations
    return Memory(
        total=total,
        budget=budget,
        weights=weights,
        activations=activations,
        graphs=graphs,
        kv_cache=free,
        kv_bytes_per_token=kv_bytes_per_token(facts, layout.tensor, dtype, kind=kind),
        kv_tokens=int(concurrency * engine.max_model_len),  # the size of the cache that vLLM logs since 0.21
        concurrency=concurrency,
    )


def stages(layers: int, count: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage; those before the last take the remainder (vLLM 0.26 get_pp_indices)."""
    sizes = [layers // count] * count
    for number in range(layers % count):
        sizes[-(number + 2) if count > 1 else 0] += 1
    starts = [sum(sizes[:number]) for number in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_bytes(facts: ModelFacts, layout: ParallelLayout, stage: int = 0, *, kind: str = "rocm") -> int:
    """Return the bytes of weights on the fullest rank of a pipeline stage.

    Embeddings and the vision tower count to the first stage, the output head and tied embeddings to the last; weights
    for multi-token prediction (MTP) are left out. Latent attention keeps a second copy of its up-projections in 16 bit
    to fold them into queries and outputs (vLLM 0.32 layers/attention/mla_attention.py,
    process_weights_after_loading).
    """
    layers = stages(facts.layers, layout.pipeline)[stage]
    last = stage == layout.pipeline - 1
    tied = facts.tied
    total = 0.0
    for weight in facts.module_weights:
        if weight.layer is not None:
            here = weight.layer in layers
        elif weight.role == "mtp":
            here = False
        elif weight.role in ("embeddings", "encoder"):
            here = stage == 0 or (last and tied and weight.role == "embeddings")
        else:
            here = last
        if here:
            total += weight.nbytes * _share(weight, facts, layout, kind)
    if latent := facts.latent:
        folded = facts.heads * (latent.nope + latent.value) * latent.rank
        total += len(layers) * 2 * folded / layout.tensor
    return round(total)


def _share(weight: ModuleWeight, facts: ModelFacts, layout: ParallelLayout, kind: str) -> float:
    """Return the fraction of a weight's bytes on the fullest rank; padding can make it more than 1."""
    tensor, ranks = layout.tensor, layout.tensor * layout.data
    if weight.split == "tensor":
        return 1 / tensor
    if weight.split == "kv":
        return 1 / min(tensor, max(1, facts.kv_heads))
    if weight.split == "vocabulary":
        padded = -(-facts.vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        return padded / max(1, facts.vocabulary) / tensor
    if weight.split == "experts":
        share = -(-facts.experts // ranks) / facts.experts if layout.expert else 1 / ranks
        if not facts.gpt_oss or facts.quantization != "mxfp4":
            return share
        hidden, intermediate = _MXFP4_STEPS[kind]
        width = facts.expert_intermediate / (1 if layout.expert else ranks)
        padded_hidden = -(-facts.hidden // hidden) * hidden / facts.hidden
        padded_width = -(-width // intermediate) * intermediate / width
        return share * padded_hidden * padded_width
    if weight.split == "shared":
        # When tokens are sharded over an engine's ranks, each rank needs the whole shared expert.
        return 1.0 if layout.expert and layout.data > 1 and tensor > 1 else 1 / tensor
    return 1.0


def _profile_peak(facts: ModelFacts, layout: ParallelLayout, kind: str, engine: EngineSettings, block_size: int) -> int:
    """Return the bytes of one accelerator apart from weights, graphs and cache, at the largest step of the engine."""
    tokens, max_num_seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    hidden = 2 * tokens * facts.hidden
    attention = _attention_bytes(facts, layout, tokens)
    if latent := facts.latent:
        # Keys and values of every head for a chunk of cached latents, allocated as if in a prefill:
        # 8 requests of full length or 4 blocks a request, at most 64k tokens, at least a block a request.
        chunk = min(max(8 * engine.max_model_len, 4 * max_num_seqs * block_size), _LATENT_CHUNK)
        cached = max(chunk, max_num_seqs * block_size)
        attention += 2 * cached * -(-facts.heads // layout.tensor) * (latent.nope + latent.value)
    # Gate and up projections of all tokens in one tensor, and their product.
    dense = 2 * tokens * 3 * max(facts.intermediate, facts.shared_intermediate) // layout.tensor
    # The experts' workspaces stay allocated between layers.
    body = hidden * 2 + max(attention, dense) + _expert_bytes(facts, layout, tokens)
    rows = min(max_num_seqs, tokens)
    sampler = hidden + rows * facts.vocabulary * _SAMPLER_BYTES
    outside = _OUTSIDE[kind] + (_COMMUNICATION[kind] if layout.gpus > 1 else 0)
    # One table of sines and cosines for all layers: [context, rotated elements] in 16 bit. DeepSeek V4 has two in 32.
    rope = 2 * facts.context * (latent.rope if latent else facts.head_dim)
    if facts.compressed:
        rope = 8 * facts.context * int(facts.fields["qk_rope_head_dim"])
    return max(body, sampler) + outside + rope + (_ENCODER_PEAK if facts.multimodal else 0)


def graph_bytes(facts: ModelFacts, cudagraph_mode: str | None, max_num_seqs: int) -> int:
    """Return the bytes of captured graphs: 0 for None and "NONE", which capture nothing.

    Sizes are 1, 2, 4, then every 8th up to 256 and every 16th up to 512 tokens, at most twice ``max_num_seqs``
    (vLLM 0.26 vllm/config/vllm.py). FULL_AND_PIECEWISE captures two sets that share a pool.
    """
    mode = (cudagraph_mode or "NONE").upper()
    if mode == "NONE":
        return 0
    largest = min(512, 2 * max_num_seqs)
    sizes = 3 + len(range(8, min(largest, 255) + 1, 8)) + len(range(256, largest + 1, 16))
    sets = 2 if mode == "FULL_AND_PIECEWISE" else 1
    graph = max(_MIB, facts.layers * _GRAPHS_PER_LAYER)
    return _FIRST_CAPTURE + sets * (sizes - 1) * graph


def _attention_bytes(facts: ModelFacts, layout: ParallelLayout, tokens: int) -> int:
    """Return the bytes of all tokens' queries, keys, values and outputs in 16 bit; for MLA and DeepSeek V4,
    of latents too.

    The attention itself needs nothing: vLLM's profiling run skips it.
    """
    latent, heads = facts.latent, -(-facts.heads // layout.tensor)
    if latent:
        width = heads * (latent.nope + latent.rope + latent.value) + latent.rank + latent.rope
        return 2 * tokens * (width + (latent.query_rank or 0))
    if sizes := facts.compressed:
        # Queries and outputs, their latents, the one key-value head, and a compressor's keys and scores in float32.
        latents = sizes.query_rank + sizes.groups * sizes.output_rank // layout.tensor
        return 2 * tokens * (facts.head_dim * (2 * heads + 1 + 8) + latents)
    return 2 * tokens * facts.head_dim * (2 * heads + 2 * max(1, facts.kv_heads // layout.tensor))


def _expert_bytes(facts: ModelFacts, layout: ParallelLayout, tokens: int) -> int:
    """Return the bytes of the fused experts' two workspaces and of the router's logits in float32.

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
