"""The table of checks, what a whole machine adds up to, and the checks that a plan asks for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from quantmint.pipeline.serving.host.checks import CHECK_FUNCTIONS, checks, preflight, run_checks
from quantmint.pipeline.serving.host.context import gather_context, root_fix_script
from quantmint.pipeline.serving.knobs.table import table
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import HostCheck, LaunchPlan, Memory, ParallelLayout
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target, profile
from tests.serving.host import trees
from tests.serving.host.trees import GIB, machine

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
GUIDES = ("ROCm 2025", "ROCm 2026", "vLLM MI300X 2024", "ROCm FP8 2024", "vLLM parallelism")


def plan(*names: str, target: str = "mi300x:8", utilization: str = "0.92", **layout: int) -> LaunchPlan:
    return LaunchPlan(
        env={},
        argv=("vllm", "serve", "/m", "--gpu-memory-utilization", utilization),
        served_model_name="m",
        tensor_parallel_size=layout.get("tensor", 1),
        reasons=(),
        layout=ParallelLayout(**layout),
        memory=Memory(192 * GIB, 0, 0, 0, 0, 0, 0, 0, 0.0),
        host=tuple(HostCheck(name, f"{name} as planned", "the plan's reason", "the plan's source") for name in names),
        target=target,
    )


def test_every_row_has_a_look_and_every_look_a_row():
    assert set(checks()) == set(CHECK_FUNCTIONS)
    for check in checks().values():
        assert set(check.kinds) <= {"rocm", "cuda", "cpu"}
        assert check.kinds
        assert re.match(rf"({'|'.join(GUIDES)}): \w|ROCm: |vLLM 0\.\d+|quantmint$", check.source), check.source
        assert not any(text.endswith(".") for text in (check.expected, check.why, check.fix))


def test_what_a_plan_demands_is_looked_at():
    """Every knob of kind `host` has a check of the same name, and is a question for the same hardware."""
    demanded = {knob.name: knob for knob in table().values() if knob.kind == "host" and knob.rules}
    assert set(demanded) <= set(checks())
    for name, knob in demanded.items():
        conditions = [rule.when["kind"] for rule in knob.rules if "kind" in rule.when]
        kinds = {kind for kind in ("rocm", "cuda", "cpu") if any(condition.holds(kind) for condition in conditions)}
        assert kinds <= set(checks()[name].kinds)


def test_a_healthy_machine_has_nothing_to_mend(tmp_path: Path, vllm: Path):
    found = run_checks(gather_context(machine(trees.instinct(tmp_path)), vllm=vllm))
    assert {finding.status for finding in found} == {"ok", "skipped"}
    assert not any(finding.fix or finding.as_root for finding in found)
    assert root_fix_script(found).endswith("# nothing to fix as root\n")


def test_a_broken_machine_says_how_each_fault_is_mended(tmp_path: Path, vllm: Path):
    root = trees.instinct(tmp_path, used={0: 150 * GIB})
    trees.write(root, "proc/sys/kernel/numa_balancing", 1)
    trees.write(root, "proc/cmdline", "ro")
    trees.write(root, "opt/rocm/.info/version", "6.4.1")
    (root / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    (root / "dev/kfd").unlink()
    trees.infiniband(root, [("1: DOWN", "2: Polling")])
    box = machine(
        root,
        {"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        opens=lambda path: "Permission denied",
        space=lambda path: None if path.name == "shm" else trees.Space(GIB, 1),
        installed={"vllm": "0.10.0"},
    )
    found = run_checks(gather_context(box, target=parse_target("mi355x:16"), vllm=vllm))
    bad = {finding.name for finding in found if finding.status in ("warn", "fail")}
    assert bad == {name for name, check in checks().items() if "rocm" in check.kinds} - {
        "partition",
        "amd-quark",
        "checkpoint",
    }
    assert all(finding.fix for finding in found if finding.name in bad)
    text = root_fix_script(found)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, capture_output=True).stderr == ""
    assert text.count("usermod -a -G video,render ann") == 1
    assert "echo 0 > /proc/sys/kernel/numa_balancing" in text


def test_a_plan_is_checked_for_what_it_names(tmp_path: Path, vllm: Path):
    box = machine(trees.instinct(tmp_path))
    found = preflight(plan("/dev/shm", "numa_balancing", tensor=8), box, vllm=vllm)
    assert {(finding.name, finding.status) for finding in found} == {("/dev/shm", "ok"), ("numa_balancing", "ok")}
    assert preflight(plan(), box, vllm=vllm) == ()


@pytest.mark.parametrize("target", ["mi300x:1", "mi300x:8", "mi300x:16"])
def test_what_the_planner_demands_is_met_by_a_healthy_machine(tmp_path: Path, vllm: Path, target: str):
    folder = CONFIGS / "Llama-3.1-405B-Instruct" if target != "mi300x:1" else CONFIGS / "Llama-3.1-8B-Instruct"
    planned = plan_serving(
        ServingRequest(
            folder,
            model_facts(folder),
            target=parse_target(target),
            profile=profile("throughput"),
            vllm_version="0.32.0",
        )
    )
    box = trees.instinct(tmp_path)
    trees.infiniband(box, [("4: ACTIVE", "5: LinkUp")])
    found = preflight(planned, machine(box, installed={"vllm": "0.32.0", "ray": "2.50.0"}), vllm=vllm)
    assert {finding.name for finding in found} == {check.name for check in planned.host}
    assert not [finding for finding in found if finding.status == "fail"]
    assert {"numa_balancing", "/dev/kfd"} <= {finding.name for finding in found}


@pytest.mark.parametrize(
    ("layout", "target", "needed"),
    [
        ({"tensor": 8}, "mi300x:8", ServingTarget("mi300x", 8, 1, 192 * GIB)),
        ({"tensor": 2}, "mi300x:8", ServingTarget("mi300x", 2, 1, 192 * GIB)),
        ({"tensor": 2, "replicas": 4}, "mi300x:8", ServingTarget("mi300x", 8, 1, 192 * GIB)),
        ({"tensor": 8, "pipeline": 2, "nodes": 2}, "mi300x:16", ServingTarget("mi300x", 8, 2, 192 * GIB)),
        ({"replicas": 4, "packed": 2}, "mi300x:2", ServingTarget("mi300x", 2, 1, 192 * GIB)),
        ({}, "cpu", ServingTarget("cpu", 1)),
    ],
)
def test_what_a_plan_needs_of_a_node(
    tmp_path: Path, vllm: Path, layout: dict[str, int], target: str, needed: ServingTarget
):
    from quantmint.pipeline.serving.host.context import plan_target

    assert plan_target(plan(target=target, **layout)) == needed


def test_a_packed_plan_leaves_room_for_its_neighbour(tmp_path: Path, vllm: Path):
    box = machine(trees.instinct(tmp_path, count=1, used={0: 86 * GIB}))
    alone, packed = plan("GPU memory", target="mi300x:1"), plan("GPU memory", target="mi300x:1", utilization="0.45")
    assert [finding.status for finding in preflight(alone, box, vllm=vllm)] == ["fail"]
    assert [finding.status for finding in preflight(packed, box, vllm=vllm)] == ["warn"]
