"""Gates whose limits the evaluation cannot prove are refused when the recipe is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.eval import workloads
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.checks import check

Load = Callable[[str], LoadedRecipe]
TEXT = "name: r\nsource: {repo: a/b}\nquantization: {scheme: ptpc_fp8}\nevaluation: {suite: tiny}\n"


def faults(loaded: LoadedRecipe) -> list[str]:
    return [str(fault) for fault in check(loaded)]


def test_a_margin_that_cannot_be_tested(load: Load) -> None:
    [fault] = faults(load(TEXT + "gate: {accuracy: {margin: 0.005}}\n"))
    assert fault.startswith("r.yaml:5:27: gate.accuracy.margin: tiny_facts: 2000 items can test a margin of 0.")
    assert "not 0.50%, which needs " in fault


def test_a_limit_or_more_flips_make_it_untestable(load: Load) -> None:
    assert faults(load(TEXT)) == []
    [limited] = faults(load(TEXT.replace("tiny}", "tiny, limit: 1000}")))
    # The margin is a default, so the fault stands where it could be written.
    assert limited.startswith("r.yaml:1:1: gate.accuracy.margin: tiny_facts: 1000 items can test")
    [flipping] = faults(load(TEXT + "gate: {accuracy: {expected_flip_rate: 0.05}}\n"))
    assert flipping.startswith("r.yaml:5:8: gate.accuracy.margin: tiny_facts: 2000 items can test a margin of 1.")


def test_more_looks_need_more_items(load: Load) -> None:
    """Looking often costs power: a margin that one test at the end can test is refused with twenty looks."""
    tight = "gate: {accuracy: {margin: 0.0086, margins: {tiny_arithmetic: 0.06}}}\n"
    assert faults(load(TEXT.replace("tiny}", "tiny, looks: 1}") + tight)) == []
    [fault] = faults(load(TEXT.replace("tiny}", "tiny, looks: 20}") + tight))
    assert "not 0.86%" in fault


def test_tasks_that_can_each_be_tested_may_be_too_many_together(load: Load) -> None:
    [fault] = faults(load(TEXT + "gate: {accuracy: {margin: 0.0088}}\n"))
    assert "passes all 2 tasks that decide with a chance of 7" in fault
    assert "(tiny_facts 81%, tiny_arithmetic 89%), expected 80%" in fault
    assert faults(load(TEXT + "gate: {accuracy: {margin: 0.0088, margins: {tiny_arithmetic: null}}}\n")) == []
    # What the message names is enough: either of the two.
    wider, power = re.findall(
        r"tiny_facts to ([0-9.]+)% is enough\), promise less \(gate.accuracy.power: ([0-9.]+)\)", fault
    )[0]
    margins = f"{{tiny_facts: {float(wider) / 100:.4f}}}"
    assert faults(load(TEXT + f"gate: {{accuracy: {{margin: 0.0088, margins: {margins}}}}}\n")) == []
    assert faults(load(TEXT + f"gate: {{accuracy: {{margin: 0.0088, power: {power}}}}}\n")) == []


@pytest.mark.parametrize(
    ("launches", "confidence", "fewest"), [(0, 0.95, 3), (2, 0.95, 3), (3, 0.95, None), (4, 0.99, 5), (5, 0.99, None)]
)
def test_launches_that_no_test_can_decide_by(load: Load, launches: int, confidence: float, fewest: int | None) -> None:
    loaded = load(TEXT + f"gate: {{throughput: {{launches: {launches}, confidence: {confidence}}}}}\n")
    expected = [] if fewest is None else [f"expected at least {fewest}: with fewer on each side no outcome"]
    found = faults(loaded)
    assert len(found) == len(expected)
    assert all(word in fault and fault.startswith("r.yaml:5:") for word, fault in zip(expected, found, strict=True))
    shown_only = f"gate: {{throughput: {{min_ratio: null, launches: {launches}, confidence: {confidence}}}}}\n"
    assert faults(load(TEXT + shown_only)) == []


def test_a_runtime_that_measures_no_throughput(load: Load) -> None:
    text = TEXT.replace("tiny}", "tiny, runtime: reference}")
    [fault] = faults(load(text))  # the default promise is to be no slower
    assert "gate.throughput.min_ratio: found 1 with evaluation.runtime reference, expected null" in fault
    assert faults(load(text + "gate: {throughput: {min_ratio: null}}\n")) == []


def test_a_load_that_measures_no_throughput(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "input_len: 8, output_len: 8, num_prompts: 4, warmups: 1"
    text = "name: steady\ndescription: At a rate.\nprofile: latency\ncells:\n"
    (tmp_path / "steady.yaml").write_text(text + f"  - {{name: a, rate: 2, {rows}}}\n")
    (tmp_path / "burst.yaml").write_text(
        text.replace("steady", "burst") + f"  - {{name: a, rate: 2, {rows}}}\n  - {{name: b, rate: inf, {rows}}}\n"
    )
    original = workloads.load
    monkeypatch.setattr(workloads, "load", lambda name: original(str(tmp_path / f"{name}.yaml")))
    [fault] = faults(load(TEXT + "target: {workload: steady}\n"))
    assert "every cell of workload steady offers a fixed rate of requests, expected null" in fault
    assert faults(load(TEXT + "target: {workload: burst}\n")) == []


def test_margins_of_single_tasks(load: Load) -> None:
    assert faults(load(TEXT + "gate: {accuracy: {margins: {tiny_arithmetic: null}}}\n")) == []
    [fault] = faults(load(TEXT + "gate: {accuracy: {margins: {tiny_arithmetic: 0.01}}}\n"))
    assert "tiny_arithmetic: 400 items can test" in fault
    [fault] = faults(load(TEXT + "gate: {accuracy: {margins: {arithmetic: 0.1}}}\n"))
    assert "margins.arithmetic: found no such task in suite tiny" in fault
    [fault] = faults(load(TEXT + "gate: {accuracy: {margins: {tiny_facts: null, tiny_arithmetic: null}}}\n"))
    assert "found null for every task that decides" in fault
