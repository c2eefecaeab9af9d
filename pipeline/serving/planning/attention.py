"""Which attention backend runs on an Instinct GPU, and what it takes: heads of one accelerator, an FP8 KV cache.

    >>> takes("ROCM_AITER_MLA", (0, 14)).heads
    (16, 128)

Why it matters before a server starts: AITER's kernels for latent attention assert the heads of one accelerator when
layers are built, after the weights of a 700 GB model were read. The table is `attention.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.versions import parse_version, within

FLAG, VARIABLE, SWITCH = "--attention-backend", "VLLM_ATTENTION_BACKEND", "VLLM_ROCM_USE_AITER"


class Takes(NamedTuple):
    """``heads`` are numbers of attention heads on one accelerator, None for any; ``source`` is where that stands."""

    heads: tuple[int, ...] | None
    fp8: bool
    source: str


def takes(backend: str | None, version: tuple[int, ...]) -> Takes:
    """What a backend takes in a version of vLLM; everything, where the table knows no limit."""
    for row in _document()["takes"].get(backend, ()):
        if _covers(row["vllm"], version):
            return Takes(None if row["heads"] == "any" else tuple(row["heads"]), row["fp8"], row["source"])
    return Takes(None, True, "")


def aiter_mla(facts: ModelFacts, tensor: int, version: tuple[int, ...]) -> bool:
    """Whether AITER's latent attention takes this model's heads, split over ``tensor`` accelerators."""
    heads = takes("ROCM_AITER_MLA", version).heads
    return facts.attention == "mla" and (heads is None or facts.heads // tensor in heads)


def mm_prefix(facts: ModelFacts) -> bool:
    """Whether tokens of an image attend to each other in both directions, which AITER's backends do not do."""
    return facts.multimodal and facts.model_type in _document()["mm_prefix"]


def known_on_rocm(facts: ModelFacts, version: tuple[int, ...]) -> bool:
    """Whether vLLM's ROCm build has a backend for this kind of attention at all."""
    return facts.attention == "none" or any(_holds(row, facts.family, version) for row in _document()["chosen"])


def running(
    facts: ModelFacts, kind: str, version: tuple[int, ...], env: Mapping[str, str], argv: Sequence[str]
) -> str | None:
    """The backend that a launch's log must name; None where that cannot be told from here."""
    if FLAG in argv:
        return argv[argv.index(FLAG) + 1]
    if VARIABLE in env:
        return env[VARIABLE]
    if kind != "rocm" or facts.attention == "none":
        return None
    if env.get(SWITCH) != "1":
        return {"dsa": None, "mla": "TRITON_MLA"}.get(facts.attention, "TRITON_ATTN" if version < (0, 19) else None)
    if env.get("VLLM_ROCM_USE_AITER_MLA") == "0" and facts.attention == "mla":
        return "TRITON_MLA"
    if env.get("VLLM_ROCM_USE_AITER_MHA") == "0" and facts.attention == "mha":
        unified = {"VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION", "VLLM_USE_AITER_UNIFIED_ATTENTION"} & set(env)
        return "ROCM_AITER_UNIFIED_ATTN" if unified else None
    rows = (row["backend"] for row in _document()["chosen"] if _holds(row, facts.family, version))
    chosen: str | None = next(rows, None)
    # A head size that AITER's flash attention has no kernel for makes vLLM pick another, by rules of its own.
    return None if chosen == "ROCM_AITER_FA" and facts.head_dim not in {64, 128, 256} else chosen


def _holds(row: Mapping[str, Any], family: str, version: tuple[int, ...]) -> bool:
    return family in row["family"] and _covers(row["vllm"], version)


def _covers(between: Sequence[str | None], version: tuple[int, ...]) -> bool:
    first, end = (parse_version(bound) if bound else () for bound in between)
    return within(version, first, end)


@cache
def _document() -> dict[str, Any]:
    text = resources.files("pipeline.serving.planning").joinpath("attention.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document
