"""Memory beside weights and cache: what vLLM's profiling run finds at its peak, its graphs, its communication.

vLLM runs the model once on ``max_num_batched_tokens`` dummy tokens, then the sampler on ``max_num_seqs`` rows of
logits, and takes the largest sum of what PyTorch held (vLLM 0.26 v1/worker/gpu_worker.py, determine_available_memory).
"""

from __future__ import annotations

from typing import Literal

from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import Layout

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


def profile_peak(
    facts: ModelFacts,
    layout: Layout,
    *,
    kind: Literal["rocm", "cuda", "cpu"],
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> int:
    """Bytes that one accelerator needs beside weights, graphs and cache."""
    tokens = max_num_batched_tokens
    hidden = 2 * tokens * facts.hidden
    attention = _attention(facts, layout, tokens)
    if facts.shape.latent:
        # 8 requests of full length or 4 blocks a request, at most 64k tokens, at least a block a request.
        chunk = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), _LATENT_CHUNK)
        attention += _expanded(facts, layout, max(chunk, max_num_seqs * block_size))
    # The experts' workspaces stay allocated from one layer to the next.
    body = hidden * 2 + max(attention, _dense(facts, layout, tokens)) + _mixture(facts, layout, tokens)
    rows = min(max_num_seqs, tokens)
    sampler = hidden + rows * facts.vocabulary * _SAMPLER_BYTES
    outside = _OUTSIDE[kind] + (_COMMUNICATION[kind] if layout.gpus > 1 else 0)
    return max(body, sampler) + outside + _rope(facts) + (_ENCODER_PEAK if facts.multimodal else 0)


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
    latent, heads = facts.shape.latent, -(-facts.heads // layout.tensor)
    if latent:
        width = heads * (latent.nope + latent.rope + latent.value) + latent.rank + latent.rope
        return 2 * tokens * (width + (latent.query_rank or 0))
    return 2 * tokens * facts.head_dim * (2 * heads + 2 * max(1, facts.kv_heads // layout.tensor))


def _expanded(facts: ModelFacts, layout: Layout, tokens: int) -> int:
    """Keys and values of every head for a chunk of cached latents, which the profile allocates as if in a prefill."""
    latent = facts.shape.latent
    assert latent is not None  # noqa: S101 - the caller asked
    return 2 * tokens * -(-facts.heads // layout.tensor) * (latent.nope + latent.value)


def _dense(facts: ModelFacts, layout: Layout, tokens: int) -> int:
    """Gate and up of all tokens in one tensor, and their product."""
    width = max(facts.intermediate, facts.shape.shared_intermediate)
    return 2 * tokens * 3 * width // layout.tensor


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


def _rope(facts: ModelFacts) -> int:
    """The table of sines and cosines, one for all layers: [context, rotated elements] in 16 bit."""
    latent = facts.shape.latent
    return 2 * facts.context * (latent.rope if latent else facts.head_dim)
