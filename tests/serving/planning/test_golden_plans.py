"""Plans of known models on known machines, as text; and what holds for the plan of any model on any machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.schemes import table as schemes
from quantmint.pipeline.serving.knobs.table import table as knobs
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, processes
from quantmint.pipeline.serving.planning.layout import split_faults
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget, profile, profiles
from tests.serving.golden.text import CONFIGS, FOLDER, cases, plan_of, text_of
from tests.tools.vllm_interface import read_table

INTERFACES = read_table()
CASES = cases()
SERVED = [case for case in CASES if not case.get("refused")]
MODELS = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
#: Given by `plan.processes` to the processes of a launch, beside what the plan says.
OUR_OWN = {"--host", "--port"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_plan_is_the_one_that_was_reviewed(case):
    kept = (FOLDER / f"{case['name']}.txt").read_text(encoding="utf-8")
    assert text_of(case) == kept, "read the difference, then `python -m tests.serving.golden.text` keeps it"
    assert ("\nREFUSED\n" in kept) == case.get("refused", False)


def test_the_cases_cover_what_is_promised():
    assert {path.stem for path in FOLDER.glob("*.txt")} == {case["name"] for case in CASES}
    assert {case["profile"] for case in SERVED} == set(profiles())
    assert {"0.19.0", "0.23.0", "0.29.0", "0.33.0"} <= {case["vllm"] for case in SERVED}
    assert {case["target"].partition(":")[0] for case in SERVED} == {"mi300x", "mi325x", "mi355x", "cpu"}
    families = {model_facts(CONFIGS / case["model"]).family for case in SERVED}
    assert families == {"dense", "moe", "mla", "dsa", "gpt-oss"}


def unknown_to(version: str, plan: LaunchPlan) -> list[str]:
    """What of a launch a version of vLLM does not have, by its source."""
    known = INTERFACES[version]
    values = {word: plan.argv[at + 1] for at, word in enumerate(plan.argv[:-1]) if word.startswith("--")}
    words = {word for process in processes(plan) for word in process.argv[3:]}
    names = {name for name in plan.env if name.startswith("VLLM_")}
    names |= {name for process in processes(plan) for name in process.env if name.startswith("VLLM_")}
    missing = [word for word in words if word.startswith("--") and word not in {*known["flags"], *OUR_OWN}]
    missing += [name for name in names if name not in known["env"]]
    for name, value in {**values, **plan.env}.items():
        # A list of choices may be open at its end; those of an enumeration are not.
        if name in known and value not in known[name]:
            missing.append(f"{name}={value}")
    return sorted(missing)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case["name"])
def test_every_word_of_a_plan_is_known_to_its_version(case):
    assert unknown_to(case["vllm"], plan_of(case)) == []


def test_a_word_that_a_version_lacks_is_noticed():
    plan = plan_of(SERVED[0])
    old = replace(plan, argv=(*plan.argv, "--swap-space", "4"), env={**plan.env, "VLLM_RPC_TIMEOUT": "1"})
    assert unknown_to("0.33.0", old) == ["--swap-space", "VLLM_RPC_TIMEOUT"]


@cache
def known_facts(name: str) -> ModelFacts:
    return model_facts(CONFIGS / name)


@st.composite
def questions(draw) -> dict:
    facts = known_facts(draw(st.sampled_from(MODELS)))
    hardware = draw(st.sampled_from(["mi300x", "mi325x", "mi350x", "mi355x"]))
    if facts.quantization == "none" and draw(st.booleans()):
        scheme = draw(st.sampled_from(sorted(schemes())))
        layout = draw(st.sampled_from(schemes()[scheme].formats))
        facts = as_quantized(facts, scheme=scheme, kv_cache=draw(st.sampled_from(["auto", "fp8"])), format=layout)
    length = draw(st.one_of(st.none(), st.integers(1, 200_000)))
    return {
        "facts": facts,
        "target": ServingTarget(hardware, draw(st.integers(1, 8)), draw(st.sampled_from([1, 1, 2, 3]))),
        "profile": profile(
            draw(st.sampled_from(sorted(profiles()))), concurrency=draw(st.integers(1, 5000)), max_model_len=length
        ),
        "vllm_version": draw(st.sampled_from(sorted(INTERFACES))),
        "purpose": draw(st.sampled_from(["serve", "measure", "tune"])),
        "servers_per_gpu": draw(st.sampled_from([1, 1, 1, 2])),
    }


def planned(question: dict) -> LaunchPlan | UserError:
    try:
        return plan_serving(ServingRequest("/m", **question))
    except UserError as error:
        return error


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(questions())
def test_any_plan_fits_and_any_refusal_speaks(question):
    target, facts = question["target"], question["facts"]
    plan = planned(question)
    if isinstance(plan, UserError):
        assert plan.message.strip()
        assert "\n" not in plan.message
        return
    layout = plan.layout
    assert layout.gpus * layout.replicas <= target.gpus * target.nodes
    assert layout.nodes <= target.nodes
    assert layout.tensor <= target.gpus
    assert split_faults(facts, layout) == ()
    length = int(plan.argv[plan.argv.index("--max-model-len") + 1]) if "--max-model-len" in plan.argv else facts.context
    assert plan.memory is not None
    assert plan.memory.kv_tokens >= length
    assert plan.memory.weights + plan.memory.kv_cache <= plan.memory.budget <= plan.memory.total
    reasons = {reason.knob for reason in plan.reasons}
    assert {*plan.env, *(word for word in plan.argv if word.startswith("--"))} <= reasons
    assert reasons - {"layout"} <= set(knobs())
    assert unknown_to(question["vllm_version"], plan) == []
    assert plan == plan_serving(ServingRequest("/m", **question))
    started = processes(plan)
    used = [(process.node, gpu) for process in started for gpu in process.gpus]
    assert all(node < target.nodes and gpu < target.gpus for node, gpu in used)
    servers = [process for process in started if process.port is not None]
    assert len(servers) == layout.replicas * layout.packed
    assert len({process.port for process in servers}) == len(servers)
    if layout.packed == 1:
        assert len(set(used)) == len(used) == layout.gpus * layout.replicas
