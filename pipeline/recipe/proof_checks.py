"""What a recipe promises that its proof could never show: a margin below its reach, a test that nothing decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from eval import suites
from eval.suites import Suite
from eval.throughput import fewest_launches
from eval.workloads import Workload
from pipeline.recipe.faults import Fault, did_you_mean
from pipeline.recipe.load import LoadedRecipe
from pipeline.recipe.proof import Evaluation, Gate


def accuracy_faults(loaded: LoadedRecipe, suite: Suite) -> Iterator[Fault]:
    """Margins that the suite's items cannot test in as many looks, and scores of tasks that it does not have."""
    gate = loaded.recipe.gate.accuracy
    suite = suite.judged_by(gate.margins)
    if not any(task.gated for task in suite.tasks):
        yield loaded.fault(("gate", "accuracy", "margins"), "found null for every task that decides, expected one left")
    asked = as_asked(suite, loaded.recipe.evaluation, loaded.recipe.gate)
    looks = loaded.recipe.evaluation.looks
    for sentence in suites.untestable(asked, gate.margin, gate.confidence, gate.power, looks):
        yield loaded.fault(("gate", "accuracy", "margin"), sentence)
    known = [task.task for task in suite.tasks]
    named = [("baseline_score", name) for name in gate.baseline_score] + [("margins", name) for name in gate.margins]
    for field, name in named:
        if name not in known:
            yield loaded.fault(
                ("gate", "accuracy", field, name),
                f"found no such task in suite {suite.name}, "
                f"expected one of {', '.join(known)}{did_you_mean(name, known)}",
            )
    answer = max((task.max_gen_tokens or 0 for task in suite.tasks), default=0)
    if answer >= loaded.recipe.target.max_model_len:
        yield loaded.fault(
            ("target", "max_model_len"),
            f"found {loaded.recipe.target.max_model_len}, expected more than {answer}: "
            f"suite {suite.name} lets a model answer with that many tokens",
        )


def throughput_faults(loaded: LoadedRecipe, workload: Workload | None) -> Iterator[Fault]:
    """A promise of speed that nothing measures, or that so few launches cannot show; `workload` where it is known."""
    gate = loaded.recipe.gate.throughput
    if gate.min_ratio is None:
        return
    promise = ("gate", "throughput", "min_ratio")
    if loaded.recipe.evaluation.runtime == "reference":
        found = f"found {gate.min_ratio:g} with evaluation.runtime reference"
        yield loaded.fault(promise, f"{found}, expected null: that runtime measures no throughput")
    elif workload is not None and all(math.isfinite(cell.rate or math.inf) for cell in workload.cells):
        found = f"found {gate.min_ratio:g}, but every cell of workload {workload.name} offers a fixed rate of requests"
        yield loaded.fault(promise, f"{found}, expected null: latency is what such a load measures")
    fewest = fewest_launches(gate.confidence)
    if gate.launches < fewest:
        yield loaded.fault(
            ("gate", "throughput", "launches"),
            f"found {gate.launches}, expected at least {fewest}: with fewer on each side no outcome is significant at "
            f"{gate.confidence:.0%} confidence, however clear",
        )


def as_asked(suite: Suite, evaluation: Evaluation, gate: Gate) -> Suite:
    """A suite as a recipe has it asked: no more items than its limit, and as many flips as it expects."""
    tasks = tuple(
        replace(
            task,
            items=min(task.items, evaluation.limit or task.items),
            expected_flip_rate=gate.accuracy.expected_flip_rate or task.expected_flip_rate,
        )
        for task in suite.tasks
    )
    return replace(suite, tasks=tasks)
