"""What is logged, from a report alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.eval.comparison.model import read
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.runs.tracking import FINGERPRINT, content_of, metrics, params, tags
from quantmint.pipeline.store.tree import Store
from tests.checkpoints import GOOD


def test_parameters_are_the_recipe_with_dotted_keys() -> None:
    recipe = {
        "name": "r",
        "source": {"folder": "model", "repo": None},
        "gate": {"accuracy": {"margin": 0.01, "baseline_score": {}}},
        "quantization": {"exclude": ["re:.*a", "b"]},
        "tracking": {"mlflow": "http://internal:5000"},
    }
    assert params(recipe) == {
        "name": "r",
        "source.folder": "model",
        "source.repo": "null",
        "gate.accuracy.margin": "0.01",
        "gate.accuracy.baseline_score": "{}",
        "quantization.exclude": '["re:.*a", "b"]',
    }


def test_keys_and_values_are_those_that_mlflow_takes() -> None:
    ((key, value),) = params({"a{b}\N{EN DASH}" + 300 * "c": 7000 * "x"}).items()
    assert (key[:5], len(key), len(value)) == ("a_b__", 250, 5000)


def test_metrics_are_the_gates_figures(tmp_path: Path) -> None:
    found = read(GOOD.write(tmp_path), None)
    logged = metrics(found)
    (facts,) = (result for result in found.gate.accuracy if result.task == "facts")
    assert logged["accuracy/facts/difference"] == facts.difference == -0.001
    assert logged["accuracy/facts/lower"] == facts.lower
    assert logged["accuracy/facts/margin"] == 0.01
    assert logged["accuracy/facts/recovery"] == facts.recovery
    assert logged["size/ratio"] == 9 / 16
    assert logged["throughput/c64/ratio"] == found.gate.throughput[0].ratio
    assert logged["canary/agreement"] == 0.981
    assert all(math.isfinite(value) for value in logged.values())
    assert tags(found)["quantmint.verdict"] == "PASS"
    assert tags(found)["quantmint.hardware"] == "mi300x"


def test_one_launch_has_no_interval(tmp_path: Path) -> None:
    found = read(GOOD.write(tmp_path), None)
    once = [replace(cell, launches=(1, 1)) for cell in found.gate.throughput]
    for cells, told in ((found.gate.throughput, True), (tuple(once), False)):
        logged = metrics(replace(found, gate=replace(found.gate, throughput=cells)))
        assert "throughput/c64/ratio" in logged
        assert {f"throughput/c64/{name}" in logged for name in ("ratio_low", "ratio_high", "p_faster")} == {told}


def test_bounds_that_are_infinite_are_left_out(tmp_path: Path) -> None:
    found = read(GOOD.write(tmp_path), None)
    early = replace(found.gate.accuracy[0], lower=-math.inf, upper=math.inf)
    logged = metrics(replace(found, gate=replace(found.gate, accuracy=(early,))))
    assert "accuracy/facts/lower" not in logged
    assert "accuracy/facts/difference" in logged


def test_a_report_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    one, other = (content_of(GOOD.write(tmp_path / name), Store(tmp_path / "store")) for name in ("a", "b"))
    assert one.fingerprint == other.fingerprint == one.tags[FINGERPRINT]
    assert [path.name for path in one.artifacts] == ["report.html", "report.json", "gate.json"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match="cannot be logged"):
        content_of(tmp_path / "report.json", Store(tmp_path / "store"))
