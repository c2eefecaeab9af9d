"""The launch plan that a sweep starts from, as a function of what is changed in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pipeline.recipe.schema import Speculative
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import LaunchPlan, Layout
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.profiles import Profile
from pipeline.serving.planning.target import Target
from pipeline.tuning.space import Value

Planner: TypeAlias = Callable[[Mapping[str, Value]], LaunchPlan]
"""A plan with some knobs changed, by their names. UserError for what cannot be planned."""

_LAYOUT = frozenset(
    {"--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel"}
)


def planner(
    model: Path,
    facts: ModelFacts,
    *,
    target: Target,
    profile: Profile,
    vllm_version: str,
    overrides: Mapping[str, Value],
    speculative: Speculative | None = None,
    packed: int = 1,
    tunableop: str | None = None,
    trust_remote_code: bool = False,
    arguments: Sequence[str] = (),
) -> Planner:
    """Plan for one checkpoint; ``overrides`` hold for the base plan too, and what is changed goes on top of them.

    The layout stays that of the base plan unless it is what is changed: one knob at a time. The purpose is to measure:
    without prefix caching, for cells of one length get the same prompts.
    """

    def plan(changes: Mapping[str, Value], layout: Layout | None) -> LaunchPlan:
        return plan_serving(
            model,
            facts,
            target=target,
            profile=profile,
            vllm_version=vllm_version,
            purpose="measure",
            overrides={**overrides, **changes},
            speculative=speculative,
            layout=layout,
            trust_remote_code=trust_remote_code,
            cpu_threads=len(os.sched_getaffinity(0)),
            packed=packed,
            tunableop=tunableop,
            arguments=arguments,
        )

    base: list[LaunchPlan] = []

    def changed(changes: Mapping[str, Value]) -> LaunchPlan:
        if not base:
            base.append(plan({}, None))
        return base[0] if not changes else plan(changes, None if _LAYOUT & changes.keys() else base[0].layout)

    return changed
