"""Compare the limits and item counts of a judgement with those of the recipe and its suite.

Shipped suites never change the limits of former releases (a test pins them), so they are compared in every version of
quantmint. Only the canary's default limits come from a table that may differ between versions: if a recipe leaves them
open, a release of another version cannot be compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from quantmint.eval import suites
from quantmint.eval.errors import DefinitionError
from quantmint.eval.gate import GateReport, Policy
from quantmint.eval.measurements import Measurements
from quantmint.eval.records import is_path
from quantmint.eval.samples import SampleSet
from quantmint.eval.suites import Suite, SuiteTask
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import JsonDifference, difference, plain
from quantmint.pipeline.publish.verify.subject import ReleaseUnderTest, UnreadableError
from quantmint.pipeline.recipe.load import PROVEN_SUITE
from quantmint.pipeline.recipe.schema import Recipe

_UNKNOWN: Final = 0.01
"""Expected flip rate of a task whose suite is unknown; it is not compared."""


@dataclass(frozen=True, slots=True)
class LimitsComparison:
    """Contradictions between a judgement and its recipe, and limits that could not be compared, a sentence each."""

    faults: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def compare_with_recipe(
    subject: ReleaseUnderTest, measurements: Measurements, recorded: GateReport
) -> LimitsComparison:
    """Compare limits, tasks and item counts with the recipe, for a release of any version of quantmint.

    Raises `UnreadableError` if the release's own suite is not a plain file of the release.
    """
    recipe = Recipe.model_validate(dict(subject.manifest.recipe))
    faults = list(_other_settings(subject, recorded))
    try:
        suite = _suite(subject, recipe.evaluation.suite)
    except DefinitionError as error:
        reason = f"the suite {recipe.evaluation.suite} cannot be read here: {error}".replace(f"{subject.folder}/", "")
        if subject.manifest.quantmint == __version__:
            return LimitsComparison((*faults, reason))
        return LimitsComparison((*faults, *_stated(recipe, recorded)), (reason,))
    faults += _counts(recipe, suite, measurements)
    judged_by = recipe.judged(suite.judged_by(recipe.gate.accuracy.margins))
    target = recipe.target
    expected = recipe.gate.policy(judged_by, target.hardware, recipe.quantization.schemes, target.rounding)
    unknown: list[str] = []
    for change in _differing(expected.to_json(), recorded.policy):
        if subject.manifest.quantmint != __version__ and _is_default(change, recipe):
            values = f"{change.path[2:]} is {change.new}, not {change.old}"
            unknown.append(f"the canary's limits were another version's defaults: {values}")
        else:
            faults.append(_other_limit(change))
    return LimitsComparison(tuple(faults), tuple(unknown))


def _suite(subject: ReleaseUnderTest, named: str) -> Suite:
    if not is_path(named):
        return suites.load(named)
    strange = [line for line in subject.listing.strange if line.startswith(f"{PROVEN_SUITE}/")]
    if strange:
        raise UnreadableError(strange[0])
    subject.text(name := f"{PROVEN_SUITE}/{PurePosixPath(named).name}")
    return suites.load(str(subject.folder / name))


def _other_settings(subject: ReleaseUnderTest, recorded: GateReport) -> Iterator[str]:
    """Yield limits that differ from the settings of the stage gate in the manifest."""
    settings: Any = subject.manifest.stages["gate"].payload["settings"]
    if "policy" not in settings:
        yield "quantmint.json does not say by which limits the stage gate judged"
        return
    for change in _differing(settings["policy"], recorded.policy):
        yield f"the stage gate was given other limits: {change.path[2:]} was {change.old}, gate.json says {change.new}"


def _stated(recipe: Recipe, recorded: GateReport) -> Iterator[str]:
    """Yield limits stated in the recipe itself that differ from the judgement's, for a suite unknown here."""
    accuracy, target = recipe.gate.accuracy, recipe.target
    tasks = [
        *(
            SuiteTask(task, "", 1, _UNKNOWN, margin is not None, margin=margin)
            for task, margin in accuracy.margins.items()
        ),
        *(task for tasks in recipe.endpoints.values() for task in tasks),
    ]
    names = {task.task for task in tasks}
    # Where no task that is known decides, this one stands for those of the suite.
    suite = Suite(recipe.evaluation.suite, "", (*tasks, SuiteTask("-", "", 1, _UNKNOWN)))
    expected = recipe.gate.policy(suite, target.hardware, recipe.quantization.schemes, target.rounding).to_json()
    actual = recorded.policy.to_json()
    margins = {task: margin for task, margin in expected["margins"].items() if task in names}
    expected["margins"] = {task: limit for task, limit in actual["margins"].items() if task not in names} | margins
    if accuracy.expected_flip_rate is None:
        expected["expected_flip_rate"] = actual["expected_flip_rate"]
    for change in _differing(expected, recorded.policy):
        if not _is_default(change, recipe):
            yield _other_limit(change)


def _other_limit(change: JsonDifference) -> str:
    return (
        f"gate.json was judged by other limits than the recipe's: {change.path[2:]} is {change.new}, not {change.old}"
    )


def _is_default(change: JsonDifference, recipe: Recipe) -> bool:
    """Return whether the difference is a canary limit that the recipe leaves to the table."""
    canary = recipe.gate.canary
    if canary is None or not change.path.startswith("$.canary."):
        return False
    side = canary.min_agreement if change.path.endswith("agreement") else canary.max_kl
    return side is None


def _counts(recipe: Recipe, suite: Suite, measurements: Measurements) -> Iterator[str]:
    """Yield tasks outside the suite, and tasks of the suite that were absent or measured differently."""
    tasks = {task.task: task for task in recipe.judged(suite).tasks}
    limited = {task.task for task in suite.tasks}
    for name in measurements.samples:
        if name not in tasks:
            yield f"{name} was measured, and the suite {suite.name} has no such task"
    for name, task in tasks.items():
        if name in measurements.samples:
            for side, samples in zip(("baseline", "candidate"), measurements.samples[name], strict=True):
                limit = recipe.evaluation.limit if name in limited else None
                yield from _task_faults(task, side, samples, limit=limit, looks=recipe.evaluation.looks)
        elif measurements.stopped is None:
            yield f"{name} is a task of the suite {suite.name}, and was not measured"


def _task_faults(task: SuiteTask, side: str, samples: SampleSet, *, limit: int | None, looks: int) -> Iterator[str]:
    # An ungated task may have fewer items; without a limit a task may have more than the suite counts.
    least = min(task.items, limit or task.items) if task.gated else 1
    if samples.planned < least or (limit is not None and samples.planned > limit):
        expected = f"{least:,}" if limit is None or task.gated else f"at most {limit:,}"
        yield f"{task.task}: {samples.planned:,} items of the {side} were planned, the suite has {expected}"
    if (samples.task, samples.metric, samples.kind) != (task.task, task.metric, task.kind):
        yield f"{task.task}: the {side} was scored by {samples.metric}, the suite asks for {task.metric}"
    filters = {sample.filter for sample in samples.samples} - {task.filter}
    if filters:
        yield f"{task.task}: the {side}'s answers were read by the filter {min(filters)}, not {task.filter}"
    if samples.looks > looks:
        yield f"{task.task}: judged in {samples.looks} looks, the recipe asks for at most {looks}"


def _differing(expected: Mapping[str, Any], actual: Policy) -> tuple[JsonDifference, ...]:
    """Return the differences of limits; both sides pass the same parser, so that 0 and 0.0 are equal."""
    return tuple(difference(plain(Policy.from_json(expected).to_json()), plain(actual.to_json())))
