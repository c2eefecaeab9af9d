"""Costs of groups are measured with inputs rounded as the target's kernels round them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.sensitivity import read_groups
from quantmint.pipeline.store.tree import Store
from tests.serving.served.cases import MODEL

pytestmark = pytest.mark.slow


@pytest.fixture
def costs(tmp_path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The costs by group and scheme on a target that rounds to even and on one that rounds up, by AITER's version."""
    measured = {}
    for version in ("0.1.15", "0.1.16"):
        recipe = {
            "name": "auto",
            "source": {"folder": str(MODEL)},
            "quantization": {"scheme": "auto", "from": ["mxfp4", "ptpc_fp8"], "bits": 5},
            "calibration": {"set": "tiny", "samples": 2, "sequence_length": 64},
            "target": {"hardware": "mi355x", "aiter": version, "workload": "tiny", "max_model_len": 512},
            "evaluation": {"suite": "tiny"},
            "gate": {"throughput": {"min_ratio": None}},
        }
        (tmp_path / "auto.yaml").write_text(yaml.safe_dump(recipe))
        setting = open_setting(str(tmp_path / "auto.yaml"), store=Store(tmp_path / "store"), device="cpu")
        plan = [planned for planned in build_plan(setting) if planned.key in ("source", "sensitivity")]
        entry = run_plan(plan, setting, PlainReporter()).entry("sensitivity")
        assert entry is not None
        measured[version] = {
            group.name: {option.scheme: option.cost for option in group.options} for group in read_groups(entry)
        }
    return measured


def test_costs_follow_the_target_s_rounding(costs: dict[str, dict[str, dict[str, float]]]) -> None:
    even, up = costs["0.1.15"], costs["0.1.16"]
    assert even.keys() == up.keys()
    assert [even[name]["ptpc_fp8"] for name in even] == pytest.approx([up[name]["ptpc_fp8"] for name in up])
    assert any(even[name]["mxfp4"] != pytest.approx(up[name]["mxfp4"], rel=1e-3) for name in even)
