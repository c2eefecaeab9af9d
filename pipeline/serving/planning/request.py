"""The question that the planner answers: which model, on which machines, for which load, with which wishes.

plan_serving(ServingRequest("/models/llama", facts, parse_target("mi300x:8"), profile("throughput"), "0.33.0"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import ParallelLayout
from quantmint.pipeline.serving.planning.target import Profile, ServingTarget

Purpose = Literal["serve", "measure", "tune"]
"""Serve users; measure one side of a comparison; or serve users while knobs are measured."""

KvCacheDtype = Literal["auto", "fp8"]
"""Type of the KV cache: "auto" is 16 bit."""


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A model, the machines and the load to plan a launch for, with the choices that a user or recipe made.

    ``model`` is the folder or repository on the command line, ``vllm_version`` the version to plan for. Purpose
    "measure" turns off prefix caching and other settings that would distort a measurement. ``overrides`` replace values
    of the knob table, by the knob's name: True sets a flag without a value, False leaves the knob out. ``layout`` None
    lets the planner choose; the candidate of a comparison gets the baseline's. ``kv_cache_dtype`` None follows the
    checkpoint. Each accelerator is shared by ``servers_per_gpu`` servers. ``tunableop`` is the path of tuned matrix
    kernels. ``arguments`` are passed to `vllm serve` after the plan's own.
    """

    model: str | Path
    facts: ModelFacts
    target: ServingTarget
    profile: Profile
    vllm_version: str
    purpose: Purpose = "serve"
    overrides: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    speculative: Speculative | None = None
    layout: ParallelLayout | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    served_model_name: str = "model"
    trust_remote_code: bool = False
    cpu_threads: int = 1
    servers_per_gpu: int = 1
    tunableop: str | None = None
    arguments: tuple[str, ...] = ()
