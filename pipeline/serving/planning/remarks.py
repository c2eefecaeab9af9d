"""What to know before a plan is started: cautions of hardware, versions, attention and load, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.serving import hardware as accelerators
from pipeline.serving.plan import Layout
from pipeline.serving.planning.attention import aiter_mla, takes
from pipeline.serving.planning.launch_request import LaunchRequest
from pipeline.serving.planning.layout import LOW
from pipeline.serving.planning.splitting import split_cautions

OLDEST_READ, NEWEST_READ = "0.11.0", "0.33.0"
"""The versions of vLLM that the tables of knobs and backends were written against."""

_IMAGES = (0, 14)
"""The first version of vLLM that came as an image for ROCm."""
_SPECULATION = (16, 64)
_SPECULATIVE_TOKENS = 2
_SMALL_B = 10
"""Billions of parameters up to which the guides pack servers (7B and 8B)."""


def remarks(request: LaunchRequest, layout: Layout) -> Iterator[str]:
    """Warnings in the order in which they matter."""
    facts, accelerator = request.facts, request.target.accelerator
    yield from accelerators.cautions(
        accelerator.name, facts.quantization, request.kv_cache_dtype, facts.checkpoint_format
    )
    yield from split_cautions(facts, layout, kind=accelerator.kind)
    yield from _attention(request, layout)
    yield from _speculation(request)
    if not request.len_given and request.max_model_len < facts.context:
        yield (
            f"planned for {request.max_model_len:,} tokens of the {facts.context:,} that the model knows, because"
            " nobody said how long requests are: --max-model-len says it"
        )
    if request.purpose == "measure" and layout.replicas * layout.packed > 1:
        yield (
            f"one of {layout.replicas * layout.packed} independent servers is measured: the whole target gives as many"
            " times its throughput"
        )
    yield from _packing(request, layout)
    if accelerator.kind == "rocm" and request.numbers < _IMAGES:
        yield (
            f"no image of vLLM's own for ROCm has {request.version}: rocm/vllm:latest says no version, so give --image"
            " the tag that does"
        )
    if request.numbers[:2] > tuple(int(part) for part in NEWEST_READ.split("."))[:2]:
        yield f"vLLM {request.version} is newer than the tables of this plan, which end at {NEWEST_READ}"


def _attention(request: LaunchRequest, layout: Layout) -> Iterator[str]:
    facts = request.facts
    if request.target.accelerator.kind != "rocm":
        return
    if facts.attention == "mla" and not aiter_mla(facts, layout.tensor, request.numbers):
        known = takes("ROCM_AITER_MLA", request.numbers)
        yield (
            f"{facts.heads // layout.tensor} attention heads on each GPU: AITER's latent attention takes"
            f" {' or '.join(map(str, known.heads or ()))} in vLLM {request.version}, so the slower Triton kernel runs"
            f" ({known.source})"
        )
    if facts.attention in {"mla", "dsa"} and layout.tensor > 1 and request.profile.concurrency > LOW:
        yield (
            f"tensor parallelism keeps the whole latent KV cache on each of {layout.tensor} GPUs, which costs most"
            " under load (ROCm 2026: Data Parallel Attention (advanced))"
        )
    if facts.kv_cache_scheme == "fp8" and request.kv_cache_dtype == "auto":
        yield (
            "the checkpoint has scales for an FP8 KV cache, which this version's attention cannot read: it stays in 16"
            " bit"
        )


def _speculation(request: LaunchRequest) -> Iterator[str]:
    if request.speculative is None:
        return
    if request.speculative.tokens > _SPECULATIVE_TOKENS:
        yield (
            f"{request.speculative.tokens} speculative tokens: more than {_SPECULATIVE_TOKENS} were seen to be accepted"
            " less often and to lower throughput (ROCm 2026: Speculative decoding)"
        )
    low, high = _SPECULATION
    if not low <= request.profile.concurrency <= high:
        yield (
            f"speculative decoding was seen to pay between {low} and {high} requests in flight, not at"
            f" {request.profile.concurrency}: measure without it (ROCm 2026: Speculative decoding)"
        )


def _packing(request: LaunchRequest, layout: Layout) -> Iterator[str]:
    """Two servers on one accelerator, where the guides' small models leave room for them; never chosen unasked."""
    small = request.facts.parameters <= _SMALL_B * 1e9
    rocm = request.target.accelerator.kind == "rocm"
    if not (small and rocm and request.profile.for_throughput and layout.packed == 1 and request.purpose == "serve"):
        return
    pair = Layout(packed=2, replicas=request.target.gpus * request.target.nodes)
    memory = request.memory(pair)
    if memory.kv_cache > 0 and memory.kv_tokens >= request.max_model_len:
        yield (
            f"two servers of this model fit each GPU, with {memory.kv_tokens:,} tokens of KV cache each: --pack 2"
            " shares it out so; measure whether it pays (ROCm 2026: Configure the gpu-memory-utilization parameter)"
        )
