"""Whether a model fits: bytes of the fullest accelerator, and the tokens of the KV cache that is left."""

from __future__ import annotations

from pipeline.serving.facts import ModelFacts
from pipeline.serving.hardware import Hardware
from pipeline.serving.plan import Layout, Memory


def weight_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Bytes of the model's weights on the fullest accelerator."""
    raise NotImplementedError


def kv_bytes_per_token(facts: ModelFacts, tensor_parallel: int, kv_cache_dtype: str, *, kind: str = "cuda") -> int:
    """Bytes that one token takes in the cache of one accelerator, all layers; ``kv_cache_dtype`` is "auto" or "fp8"."""
    raise NotImplementedError


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
    """The memory of the fullest accelerator. Never raises for lack of memory: ``kv_cache`` is then zero or less."""
    raise NotImplementedError
