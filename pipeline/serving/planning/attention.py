"""Attention backends of vLLM on Instinct: which one a launch runs, and what each can hold (`attention.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.serving.environment import Version, parse_version, within
from quantmint.pipeline.serving.model.facts import ModelFacts

_BACKENDS = {"mla": "ROCM_AITER_MLA", "dsa": "ROCM_AITER_MLA_SPARSE"}
_FLAG = "--attention-backend"


def backend_of(facts: ModelFacts) -> str | None:
    """Return AITER's backend for a model with latent attention (MLA or DSA); None for other models."""
    return _BACKENDS.get(facts.attention)


class BackendLimits(NamedTuple):
    """The limits of an attention backend in a range of vLLM versions.

    ``heads`` are the supported numbers of attention heads on one accelerator, None for any; ``fp8`` says whether it
    reads an FP8 KV cache.
    """

    heads: tuple[int, ...] | None = None
    fp8: bool = True
    source: str = ""


def backend_limits(backend: str | None, version: Version) -> BackendLimits:
    """Return the limits of a backend in a vLLM version, from `attention.yaml`; no limits for a backend not in it."""
    for row in load_table(__file__, "attention.yaml")["limits"].get(backend, ()):
        first, end = (parse_version(bound) if bound else () for bound in row["vllm"])
        if within(version, first, end):
            heads = None if row["heads"] == "any" else tuple(row["heads"])
            return BackendLimits(heads, row["fp8"], row["source"])
    return BackendLimits()


def reads_fp8_cache(facts: ModelFacts, version: Version) -> bool:
    """Return whether the model's backend on ROCm reads an FP8 KV cache in this version of vLLM."""
    return backend_limits(backend_of(facts), version).fp8


def aiter_mla(facts: ModelFacts, tensor: int, version: Version) -> bool:
    """Return whether AITER's latent attention supports the model's heads, split over ``tensor`` accelerators."""
    heads = backend_limits("ROCM_AITER_MLA", version).heads or ()
    return facts.attention == "mla" and facts.heads // tensor in heads


def bidirectional_images(facts: ModelFacts) -> bool:
    """Return whether tokens of one image attend to each other in both directions, which AITER's backends cannot do."""
    return facts.multimodal and facts.model_type in load_table(__file__, "attention.yaml")["mm_prefix"]


def attention_backend(facts: ModelFacts, kind: str, env: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """Return the backend that the log of a launch must name; None where vLLM's choice is not known in advance.

    ``kind`` is the accelerator's: rocm, cuda or cpu.
    """
    if _FLAG in argv:
        return argv[argv.index(_FLAG) + 1]
    if kind != "rocm" or facts.attention in ("csa", "none"):
        return None
    aiter_on = env.get("VLLM_ROCM_USE_AITER") == "1"
    if facts.attention == "mla":
        return "ROCM_AITER_MLA" if aiter_on and env.get("VLLM_ROCM_USE_AITER_MLA") != "0" else "TRITON_MLA"
    if not aiter_on:
        return None
    return "ROCM_AITER_MLA_SPARSE" if facts.attention == "dsa" else "ROCM_ATTN"
