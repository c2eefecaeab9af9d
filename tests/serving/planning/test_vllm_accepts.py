"""The installed vLLM knows what our table says of it, and accepts every word and variable of a plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, processes
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile, profiles
from tests.serving.golden.text import cases, plan_of
from tests.tools.vllm_interface import read_table

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("vllm_parses.py")
INTERFACES = read_table()


def launches_of(plan: LaunchPlan, model: Path) -> list[dict[str, object]]:
    """What each process of a plan runs; with a model that is there, because the parser looks at it."""
    return [
        {"argv": ["vllm", "serve", str(model), *process.argv[3:]], "env": {**plan.env, **process.env}}
        for process in processes(plan)
        if process.argv[0] == "vllm"
    ]


def test_plans_for_this_machine_and_for_an_instinct_are_parsed(
    warm_vllm: VllmEnvironment, warm_environment: dict[str, str], tiny_llama: Path
) -> None:
    launches: list[dict[str, object]] = []
    facts = model_facts(tiny_llama)
    for name in profiles():
        for purpose in ("serve", "measure"):
            for dtype in ("auto", "fp8"):
                plan = plan_serving(
                    ServingRequest(
                        tiny_llama,
                        facts,
                        target=parse_target("cpu"),
                        profile=profile(name, concurrency=4, max_model_len=256),
                        vllm_version=warm_vllm.version,
                        purpose=purpose,
                        kv_cache_dtype=dtype,
                    )
                )
                launches += launches_of(plan, tiny_llama)
    version = warm_vllm.version.split("+")[0]
    refused = {case["name"] for case in cases() if case.get("refused")}
    for case in cases():
        if case["name"] not in refused:
            launches += launches_of(plan_of({**case, "vllm": version}), tiny_llama)
    assert len(launches) > 40
    wrong = {"argv": ["vllm", "serve", str(tiny_llama), "--swap-space", "4"], "env": {"VLLM_ALL2ALL_BACKEND": "naive"}}
    done = subprocess.run(
        [str(warm_vllm.python), str(SCRIPT)],
        input=json.dumps([*launches, wrong]),
        env=warm_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    if version in INTERFACES:
        assert set(answer["flags"]) - {"-h", "--help"} == INTERFACES[version]["flags"]
        assert set(answer["env"]) == INTERFACES[version]["env"]
    *found, of_wrong = answer["complaints"]
    assert [said for said in found if said] == []
    assert of_wrong[0] == "VLLM_ALL2ALL_BACKEND"
    assert "--swap-space" in of_wrong[1]
