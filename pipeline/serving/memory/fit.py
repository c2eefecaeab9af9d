"""Whether a model fits: bytes of the fullest accelerator, and the tokens of the KV cache that is left.

    >>> memory = fit(facts, hardware("mi300x"), Layout(tensor=8), hbm_bytes=None, utilization=0.95, max_model_len=32768,
    ...              max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_dtype="fp8")
    >>> memory.kv_cache > 0, memory.concurrency

Everything is arithmetic: nothing is read, and nothing is refused but hardware whose memory nobody has told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.errors import UserError
from pipeline.serving.hardware import Hardware
from pipeline.serving.memory.activations import graph_bytes, profile_peak
from pipeline.serving.memory.cache_groups import CacheGroups, LayerCache, cache_groups
from pipeline.serving.memory.sharding import stage_bytes, stages
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import Layout, Memory
from pipeline.serving.versions import parse_version

_GRAPHS_COUNTED = (0, 21)
"""Graphs are taken off the budget since vLLM 0.21 (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); before, off the rest."""
_TOKENS_BY_REQUESTS = (0, 21)
"""The logged tokens are requests of full length times their length since 0.21; before, blocks by groups."""
_ASYNC = (0, 14)
_STATES_CACHED = (0, 26)
"""Prefixes of models with recurrent states are cached by default since 0.26, which takes a second state a request."""
_IN_FLIGHT = (0, 26)
"""A window counts the tokens of all concurrent batches since 0.26; of one before."""


def weight_bytes(
    facts: ModelFacts, layout: Layout, *, kind: str = "rocm", encoder_copied: bool = True, speculative: bool = False
) -> int:
    """Bytes of the model's weights on the fullest accelerator.

    ``encoder_copied`` is ``--mm-encoder-tp-mode data``: a vision tower on every rank. ``speculative`` adds the
    checkpoint's own predictor of further tokens (MTP).
    """
    return max(
        stage_bytes(facts, layout, number, kind=kind, encoder_copied=encoder_copied, speculative=speculative)
        for number in range(layout.pipeline)
    )


def kv_bytes_per_token(facts: ModelFacts, tensor_parallel: int, kv_cache_dtype: str, *, kind: str = "cuda") -> int:
    """Bytes that one more token takes in the cache of one accelerator, in all layers that keep every token; where none
    does, in those with a window.

    ``kv_cache_dtype`` is "auto" for 16 bit, or starts with "fp8" for 8.
    """
    layers = _layer_caches(facts, tensor_parallel, kv_cache_dtype, kind)
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
    async_scheduling: bool | None = None,
    prefix_caching: bool | None = None,
    encoder_copied: bool = True,
    speculative: bool = False,
) -> Memory:
    """The memory of the fullest accelerator of a server; ``kv_cache`` is zero or less where the model does not fit.

    ``hbm_bytes`` stands in for the hardware's own. On a CPU the cache is ``cpu_kv_bytes`` (VLLM_CPU_KVCACHE_SPACE) and
    the total is the process's. ``cudagraph_mode`` None is eager. UserError where the accelerator's memory is unknown.
    """
    kind, numbers = hardware.kind, parse_version(version)
    caches = _layer_caches(facts, layout.tensor, kv_cache_dtype, kind)
    block_size = block_size or default_block_size(facts, kind)
    groups = cache_groups(caches, block_size=block_size)
    total = cpu_kv_bytes if kind == "cpu" else (hbm_bytes or hardware.hbm_bytes)
    if total is None:
        raise UserError(f"the memory of {hardware.title} is not known: expected hbm_bytes, or cpu_kv_bytes for a CPU.")
    activations = profile_peak(
        facts,
        layout,
        kind=kind,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    graphs = graph_bytes(facts, None if kind == "cpu" else cudagraph_mode, max_num_seqs)
    counted_graphs = graphs if numbers >= _GRAPHS_COUNTED else 0
    budget = total if kind == "cpu" else int(total * utilization)
    tightest: tuple[int, int, int, int] | None = None
    for number, layers in enumerate(stages(facts.layers, layout.pipeline)):
        weights = stage_bytes(facts, layout, number, kind=kind, encoder_copied=encoder_copied, speculative=speculative)
        free = budget if kind == "cpu" else budget - weights - activations - counted_graphs
        block = groups.block_bytes(layers)
        blocks = free // block if block else 0
        found = (blocks, free, weights, block) if block else (free, free, weights, block)
        tightest = found if tightest is None else min(tightest, found)
    assert tightest is not None  # noqa: S101 - there is a stage
    blocks, free, weights, _ = tightest
    batches = _batches(layout, numbers, async_scheduling)
    states = 1 + (numbers >= _STATES_CACHED if prefix_caching is None else prefix_caching)
    request = groups.blocks_of_request(max_model_len, batches * max_num_batched_tokens, states=states)
    concurrency = max(0.0, blocks / request) if request else float(max_num_seqs)
    return Memory(
        total=total if kind != "cpu" else total + weights + activations,
        budget=budget if kind != "cpu" else total + weights + activations,
        weights=weights,
        activations=activations,
        graphs=counted_graphs,
        kv_cache=free,
        kv_bytes_per_token=kv_bytes_per_token(facts, layout.tensor, kv_cache_dtype, kind=kind),
        kv_tokens=_tokens(groups, max(0, blocks), concurrency, max_model_len, numbers),
        concurrency=concurrency,
    )


def default_block_size(facts: ModelFacts, kind: str) -> int:
    """Tokens of a block where no --block-size is given (vLLM 0.32 platforms/cpu.py, v1/attention/backends/mla)."""
    latent = facts.shape.latent is not None
    if kind == "cpu":
        return 16 if latent else 128
    return 64 if latent and kind == "cuda" else 16


def _batches(layout: Layout, version: tuple[int, ...], async_scheduling: bool | None) -> int:
    """Batches that may be scheduled at the same time: one a stage, and one more with asynchronous scheduling."""
    if version < _IN_FLIGHT:
        return 1
    ahead = version >= _ASYNC if async_scheduling is None else async_scheduling
    return layout.pipeline + 1 if ahead and layout.pipeline == 1 else layout.pipeline


def _tokens(groups: CacheGroups, blocks: int, concurrency: float, length: int, version: tuple[int, ...]) -> int:
    """What vLLM logs as the size of the KV cache."""
    if version >= _TOKENS_BY_REQUESTS:
        return int(concurrency * length)
    size = min((group.block for group in groups.groups if group.block), default=0)
    return blocks // max(1, len(groups.groups)) * size


def _layer_caches(facts: ModelFacts, tensor: int, dtype: str, kind: str) -> tuple[LayerCache, ...]:
    return tuple(_caches(facts, tensor, dtype, kind))


def _caches(facts: ModelFacts, tensor: int, dtype: str, kind: str) -> Iterator[LayerCache]:
    shape, item = facts.shape, 1 if dtype.startswith("fp8") else 2
    token = 2 * max(1, facts.kv_heads // tensor) * facts.head_dim * item
    extra = 0
    if shape.latent:
        # One latent for all heads, a copy on every rank.
        token = (shape.latent.rank + shape.latent.rope) * item
        if shape.indexer:
            if item == 1 and kind == "cuda":
                token = 656  # fp8_ds_mla: latents in 8 bit, their scales, the rotary part in 16 (flashmla_sparse.py)
            # Keys of the indexer: FP8, and a float32 scale for every 128 of them (deepseek_v2.py).
            extra = shape.indexer[1] + shape.indexer[1] // 128 * 4
    for number, mixer in enumerate(shape.kinds):
        if mixer == "sliding" and shape.window:
            yield LayerCache(number, "sliding", token, shape.window)
        elif mixer in ("full", "chunked", "sliding"):
            # Chunks keep every token: vLLM turns its hybrid manager off for them (vllm/config/vllm.py).
            yield LayerCache(number, "full", token, extra=extra)
        elif mixer != "none":
            yield LayerCache(number, "state", _state_bytes(facts, mixer, tensor, kind))


def _state_bytes(facts: ModelFacts, mixer: str, tensor: int, kind: str) -> int:
    """One request's state in one layer: the convolution's last inputs, and the recurrent state (mamba_utils.py).

    The recurrent state is in 16 bit but where the configuration asks for float32, in Nemotron-H (models/config.py),
    and on CPUs, whose AMX kernels want it so (platforms/cpu.py; vLLM 0.32).
    """
    sizes = facts.shape.recurrent
    assert sizes is not None  # noqa: S101 - a layer of this kind has them
    fields = facts.shape.fields
    asked = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
    wide = kind == "cpu" or (asked or ("float32" if facts.shape.model_type == "nemotron_h" else "auto")) == "float32"
    inner, item = sizes.heads * sizes.head_dim, 4 if wide else 2
    groups = math.ceil(sizes.groups / tensor) * tensor if mixer == "mamba2" else sizes.groups
    channels = inner if mixer == "mamba1" else inner + 2 * groups * sizes.state
    return -(-channels // tensor) * (sizes.kernel - 1) * 2 + -(-inner // tensor) * sizes.state * item
