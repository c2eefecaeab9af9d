"""What the real vLLM says where it cannot start; one that answers is `test_published`'s and `test_serve`'s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile
from quantmint.pipeline.serving.running.launchers import LocalLauncher

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def plan_for(model: Path, version: str) -> LaunchPlan:
    return plan_serving(
        ServingRequest(
            model,
            model_facts(model),
            target=parse_target("cpu"),
            profile=profile("latency", concurrency=4, max_model_len=256),
            vllm_version=version,
            purpose="measure",
            kv_cache_dtype="auto",
            cpu_threads=2,
        )
    )


def test_a_flag_that_this_version_does_not_know(warm_vllm: VllmEnvironment, tiny_llama: Path, tmp_path: Path):
    plan = plan_for(tiny_llama, warm_vllm.version)
    wrong = LaunchPlan(plan.env, (*plan.argv, "--swap-space-gb", "4"), plan.served_model_name, 1, ())
    with (
        pytest.raises(ServingError, match="does not know --swap-space-gb"),
        LocalLauncher(warm_vllm.executable).launch(wrong, tmp_path / "vllm.log", startup_timeout=400),
    ):
        pass


def test_a_length_that_the_model_does_not_have(warm_vllm: VllmEnvironment, tiny_llama: Path, tmp_path: Path):
    plan = plan_for(tiny_llama, warm_vllm.version)
    longer = replace(plan, argv=tuple("4096" if word == "256" else word for word in plan.argv))
    with (
        pytest.raises(ServingError, match=r"target\.max_model_len is 4096, more than the model's context of 512"),
        LocalLauncher(warm_vllm.executable).launch(longer, tmp_path / "vllm.log", startup_timeout=400),
    ):
        pass
