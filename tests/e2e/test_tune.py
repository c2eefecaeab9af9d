"""A sweep of the embedded recipe on a real vLLM: killed once, finished by the same command, within its budget."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe.load import load_recipe
from pipeline.serving.environment import VllmEnvironment
from tests.e2e.project import RECIPE, Project

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

BUDGET_S = 1200
# Like the second cell of the embedded workload, with less to say: where requests wait is all that is asked.
WORKLOAD = """\
name: one-cell
description: 64 tokens in, 16 out, at 16 requests in flight.
profile: latency
cells:
  - {name: in64-out16-c16, input_len: 64, output_len: 16, concurrency: 16, num_prompts: 32, warmups: 4}
"""
COMMAND = (
    "tune", RECIPE, "--target", "cpu", "--workload", "one-cell.yaml", "--budget", f"{BUDGET_S}s",
    "--knob", "--max-num-seqs=2",  # one value: each is a launch of some forty seconds; many are tuned with a stand-in
)  # fmt: skip


def records(project: Project) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in project.store.glob("tune/*/record.json")}


@pytest.fixture(scope="module")
def tuned(
    vllm: Path, warm_vllm: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, dict[str, int], dict[str, Any]]:
    """A project whose sweep was killed after its first trial, and then came to its end."""
    project = Project(tmp_path_factory.mktemp("tune"), warm_vllm.executable)
    (project.home / "one-cell.yaml").write_text(WORKLOAD)
    log = project.home / "first.log"
    process = project.start(*COMMAND, log=log)
    end = time.monotonic() + 600
    while not records(project) or not list(project.store.glob("tune/*.work")):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"the sweep did not get to its second trial:\n{log.read_text()}")
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = records(project)
    done = project.run(*COMMAND, "--json", timeout=1500)
    assert done.returncode == 0, done.stderr
    return project, before, json.loads(done.stdout)


def test_a_killed_sweep_goes_on_and_measures_nothing_twice(
    tuned: tuple[Project, dict[str, int], dict[str, Any]],
) -> None:
    project, before, found = tuned
    assert before.items() <= records(project).items()
    assert found["budget"]["spent"] <= BUDGET_S
    tried = {point["label"] for point in found["points"]}
    assert tried == {"base plan", "max-num-seqs 2"}
    assert [point["status"] for point in found["points"]] == ["ok"] * len(found["points"])
    assert found["points"][0]["runs"] == 2


def test_the_sweep_sees_what_its_knobs_do(tuned: tuple[Project, dict[str, int], dict[str, Any]]) -> None:
    """Two requests at a time while sixteen wait: most first tokens come late, whatever else the machine does."""
    _, _, found = tuned
    few = {point["label"]: point for point in found["points"]}["max-num-seqs 2"]
    assert few["ratios"]["ttft_p50"] > 1
    assert {point["kv_tokens"] for point in found["points"]} == {found["points"][0]["kv_tokens"]}
    assert found["points"][0]["kv_tokens"] > 0


def test_what_it_prints_is_a_section_of_a_recipe(
    tuned: tuple[Project, dict[str, int], dict[str, Any]], tmp_path: Path
) -> None:
    _, _, found = tuned
    recipe = tmp_path / "tuned.yaml"
    recipe.write_text(f"extends: {RECIPE}\nname: tuned\n{found['serve_yaml']}")
    knobs = load_recipe(recipe).recipe.serve.overrides
    best = found["points"][found["best"]]
    own = load_recipe(RECIPE).recipe.serve.overrides
    assert dict(knobs) == {**own, **{change["knob"]: change["value"] for change in best["changes"]}}


def test_the_page_says_where_it_was_measured(tuned: tuple[Project, dict[str, int], dict[str, Any]]) -> None:
    _, _, found = tuned
    page = Path(found["page"]).read_text()
    assert "need not win with ROCm" in page
    assert found["vllm"] in page
    assert found["device"] in page
