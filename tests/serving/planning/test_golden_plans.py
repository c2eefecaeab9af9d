"""Plans of known models on known machines, as text; and what holds for the plan of any model on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.schemes import table as schemes
from pipeline.serving.knobs.table import table as knobs
from pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.processes import processes
from pipeline.serving.planning.profiles import profile
from pipeline.serving.planning.profiles import table as profiles
from pipeline.serving.planning.splitting import split_faults
from pipeline.serving.planning.target import Target, parse_target
from tests.serving.golden.text import CONFIGS, FOLDER, cases, plan_of, text_of

INTERFACES = Path(__file__).parents[2] / "assets" / "vllm"
CASES = cases()
SERVED = [case for case in CASES if not case.get("refused")]
MODELS = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
#: Given by `processes.py` to the processes of a launch, beside what the plan says.
OUR_OWN = {"--host", "--port"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_plan_is_the_one_that_was_reviewed(case):
    kept = (FOLDER / f"{case['name']}.txt").read_text(encoding="utf-8")
    assert text_of(case) == kept, "read the difference, then `python -m tests.serving.golden` keeps it"
    assert ("\nREFUSED\n" in kept) == case.get("refused", False)


def test_the_cases_cover_what_is_promised():
    assert len(SERVED) >= 44
    assert len({case["name"] for case in CASES}) == len(CASES)
    assert {path.stem for path in FOLDER.glob("*.txt")} == {case["name"] for case in CASES}
    targets = {case["target"] for case in SERVED}
    assert {"mi300x:1", "mi300x:4x2", "mi300x:8", "mi300x:16", "mi325x:1", "mi355x:4", "mi355x:8"} <= targets
    assert {case["profile"] for case in SERVED} == set(profiles())
    versions = {"0.11.0", "0.14.0", "0.19.0", "0.24.0", "0.33.0"}
    assert versions <= {case["vllm"] for case in SERVED}
    families = {model_facts(CONFIGS / case["model"]).family for case in SERVED}
    assert families == {"dense", "moe", "mla", "dsa", "gpt-oss"}
    assert {case.get("scheme") for case in SERVED} >= {None, "fp8", "mxfp4"}


@cache
def interface(version: str) -> dict:
    return json.loads((INTERFACES / f"{version}.json").read_text(encoding="utf-8"))


def unknown_to(version: str, plan: LaunchPlan) -> list[str]:
    """What of a launch a version of vLLM does not have, by its source."""
    known = interface(version)
    values = {word: plan.argv[at + 1] for at, word in enumerate(plan.argv[:-1]) if word.startswith("--")}
    words = {word for process in processes(plan) if process.argv[0] == "vllm" for word in process.argv[3:]}
    names = {name for name in plan.env if name.startswith("VLLM_")}
    names |= {name for process in processes(plan) for name in process.env if name.startswith("VLLM_")}
    missing = [word for word in words if word.startswith("--") and word not in {*known["flags"], *OUR_OWN}]
    missing += [name for name in names if name not in known["env"]]
    for name, value in {**values, **plan.env}.items():
        # A list of choices may be open at its end; those of an enumeration are not.
        if name in known["choices"] and value not in known["choices"][name]:
            missing.append(f"{name}={value}")
    return sorted(missing)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case["name"])
def test_every_word_of_a_plan_is_known_to_its_version(case):
    assert unknown_to(case["vllm"], plan_of(case)) == []


def test_a_word_that_a_version_lacks_is_noticed():
    plan = plan_of(next(case for case in SERVED if case["vllm"] == "0.33.0" and "deepseek-r1" in case["name"]))
    assert unknown_to("0.33.0", plan) == []
    assert unknown_to("0.11.0", plan)


def test_the_texts_are_made_by_one_command():
    command = [sys.executable, "-m", "tests.serving.golden", "--check"]
    done = subprocess.run(command, cwd=FOLDER.parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


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
        "target": Target(hardware, draw(st.integers(1, 8)), draw(st.sampled_from([1, 1, 2, 3]))),
        "profile": profile(
            draw(st.sampled_from(sorted(profiles()))), concurrency=draw(st.integers(1, 5000)), max_model_len=length
        ),
        "vllm_version": draw(st.sampled_from(sorted(path.stem for path in INTERFACES.glob("*.json")))),
        "purpose": draw(st.sampled_from(["serve", "measure"])),
        "packed": draw(st.sampled_from([1, 1, 1, 2])),
    }


def planned(question: dict) -> LaunchPlan | UserError:
    try:
        return plan_serving("/m", **question)
    except UserError as error:
        return error


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    assert plan == plan_serving("/m", **question)
    started = processes(plan)
    used = [(process.node, gpu) for process in started if process.role != "server" for gpu in process.gpus]
    used += [
        (process.node, gpu)
        for process in started
        if process.role == "server" and layout.packed == 1
        for gpu in process.gpus
    ]
    assert all(node < target.nodes and gpu < target.gpus for node, gpu in used)
    servers = [process for process in started if process.port is not None]
    assert len(servers) == layout.replicas * layout.packed
    assert len({process.port for process in servers}) == len(servers)
    if layout.nodes == 1 and layout.packed == 1:
        assert len(set(used)) == len(used) == layout.gpus * layout.replicas


@pytest.mark.parametrize("text", ["mi300x:8", "mi355x:8"])
def test_fewer_bytes_never_need_more_accelerators(text):
    busy = {
        "target": parse_target(text),
        "profile": profile("throughput", max_model_len=8192),
        "vllm_version": "0.33.0",
    }
    dense = known_facts("Llama-3.1-405B-Instruct")
    sizes = [
        plan_serving("/m", facts, **busy).layout.tensor
        for facts in (dense, as_quantized(dense, scheme="fp8", kv_cache="fp8"), as_quantized(dense, scheme="mxfp4"))
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
