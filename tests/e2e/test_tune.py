"""A sweep of the embedded recipe on a real vLLM, within its budget."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.serving.environment import VllmEnvironment
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


@pytest.fixture(scope="module")
def found(vllm: Path, warm_vllm: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a sweep says; one that is killed measures nothing twice: `test_interrupted`."""
    project = Project(tmp_path_factory.mktemp("tune"), warm_vllm.executable)
    (project.home / "one-cell.yaml").write_text(WORKLOAD)
    done = project.run(*COMMAND, "--json", timeout=1500)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_sweep_stays_within_its_budget(found: dict[str, Any]) -> None:
    assert found["budget"]["spent"] <= BUDGET_S
    assert {point["label"] for point in found["points"]} == {"base plan", "max-num-seqs 2"}
    assert [point["status"] for point in found["points"]] == ["ok"] * len(found["points"])
    assert found["points"][0]["runs"] == 2


def test_the_sweep_sees_what_its_knobs_do(found: dict[str, Any]) -> None:
    """Two requests at a time while sixteen wait: most first tokens come late, whatever else the machine does."""
    few = {point["label"]: point for point in found["points"]}["max-num-seqs 2"]
    assert few["ratios"]["ttft_p50"] > 1
    assert {point["kv_tokens"] for point in found["points"]} == {found["points"][0]["kv_tokens"]}
    assert found["points"][0]["kv_tokens"] > 0


def test_what_it_prints_is_a_section_of_a_recipe(found: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "tuned.yaml"
    recipe.write_text(f"extends: {RECIPE}\nname: tuned\n{found['serve_yaml']}")
    knobs = load_recipe(recipe).recipe.serve.overrides
    best = found["points"][found["best"]]
    own = load_recipe(RECIPE).recipe.serve.overrides
    assert dict(knobs) == {**own, **{change["knob"]: change["value"] for change in best["changes"]}}


def test_the_page_says_where_it_was_measured(found: dict[str, Any]) -> None:
    page = Path(found["page"]).read_text()
    assert "the best knobs may differ with ROCm's kernels" in html.unescape(page)
    assert found["vllm"] in page
    assert found["device"] in page
