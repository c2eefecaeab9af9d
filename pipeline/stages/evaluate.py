"""evaluate: one side answers the tasks of a suite, look by look; control: the baseline answers some items again.

The baseline answers all items. The candidate's answers to a gated task are compared with the baseline's after each
look, and the task ends as soon as the sequential boundary (`eval.statistics.sequential`, which the gate uses too) says
PASS or FAIL.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantmint.eval import harness as draw
from quantmint.eval.accuracy import margin_in_units
from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import Asked, Item, common_settings, compressed, joined, read_asked
from quantmint.eval.samples import SampleSet, pair
from quantmint.eval.statistics import sequential
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.answers import KnownAnswers, chunks, known_answers
from quantmint.pipeline.stages.estimate import Estimate, control_items, planned_items
from quantmint.pipeline.stages.lm_eval import Harness, open_harness
from quantmint.pipeline.stages.paired import PairedStage
from quantmint.pipeline.stages.serve import (
    SERVER_LOG,
    faults,
    keep_log,
    launch_plan,
    require_server,
    runtime_modules,
    runtime_tools,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage, write_json
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here

ANSWERS = "answers"
DATASETS = "datasets"


HARNESS_MODULES = tuple(("evaluate", name) for name in ("lm_eval", "tenacity", "aiohttp", "requests"))
"""lm-eval, with the modules that its client of an API imports."""
_TASK_MODULES = {"ifeval": ("langdetect", "immutabledict", "nltk")}
"""Modules that lm-eval's own tasks import when they are loaded, by a part of the tasks' names."""
_HARNESS_S = 5.0
"""Seconds of importing lm-eval."""


class EvaluateStage(PairedStage):
    """Ask a side the items of the suite; stored answers that were asked in the same way are reused."""

    family = "evaluate"
    version = 2

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Yield (extra, module) pairs of lm-eval, of the runtime, and of tasks that need modules of their own."""
        yield from (*HARNESS_MODULES, *runtime_modules(setting))
        for task in setting.suite.tasks:
            for part, names in _TASK_MODULES.items():
                yield from (("evaluate", name) for name in names if part in task.task)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of starting the server and asking the items.

        The baseline is asked all planned items. The candidate is asked as many of them as looks need on average to pass
        one that loses nothing (`Estimate.expected`). lm-eval's import counts for the baseline only, because a run
        imports it once.
        """
        items, item_seconds = planned_items(estimate.setting), estimate.item_seconds
        if self.side == "baseline":
            return estimate.restart + _HARNESS_S + sum(items[name] * seconds for name, seconds in item_seconds.items())
        candidate_items = {name: min(items[name], estimate.expected.get(name) or items[name]) for name in item_seconds}
        return estimate.restart + sum(candidate_items[name] * seconds for name, seconds in item_seconds.items())

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the tasks by content, how they are asked, and the limits that end a task early."""
        evaluation, accuracy = setting.recipe.evaluation, setting.recipe.gate.accuracy
        slice_ = {
            **lm_eval.task_settings(setting, *setting.suite.tasks),
            "limit": evaluation.limit,
            "looks": evaluation.looks,
        }
        if self.side == "candidate" and evaluation.looks > 1:
            margins = {task.task: task.margin or accuracy.margin for task in setting.suite.tasks if task.gated}
            slice_["policy"] = {"margins": margins, "confidence": accuracy.confidence}
        return slice_

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the harness, the tokenizer and the runtime."""
        return {**versions("lm-eval", "transformers", "datasets"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Ask one task after the other and record samples, answers and scores.

        lm-eval and the server start only where an answer is missing. Raises `MeasurementError` where a task has too few
        items or was not answered.
        """
        setting = job.setting
        for folder in (lm_eval.SAMPLES, ANSWERS, DATASETS):
            (job.path / folder).mkdir(exist_ok=True)
        with _Questions(job, self) as questions:
            # All of them first: data that cannot be had is told before the first hour of asking.
            for task in setting.suite.tasks:
                _require_whole(task, questions.load(task))
            for task in setting.suite.tasks:
                compared = self.side == "candidate" and task.gated and setting.recipe.evaluation.looks > 1
                baseline = read_samples(job.inputs["baseline"].path, task) if compared else None
                _evaluate(job, task, questions, baseline)
            void = questions.faults()
        sets = {task.task: read_samples(job.path, task) for task in setting.suite.tasks}
        scores = {name: samples.mean for name, samples in sets.items()}
        lm_eval.tidy(job.path)
        write_json(job.path / ENVIRONMENT, environment_here(self.tools(setting)).to_json())
        return Output(
            result={
                "scores": scores,
                "items": {name: [len(samples.samples), samples.planned] for name, samples in sets.items()},
                "asked": questions.asked,
                "datasets": {name: json.loads((job.path / DATASETS / f"{name}.json").read_text()) for name in sets},
                "faults": void,
            },
            summary=", ".join(
                _summary(samples, read_samples(job.inputs["baseline"].path, task) if "baseline" in job.inputs else None)
                for task, samples in zip(setting.suite.tasks, sets.values(), strict=True)
            ),
        )


class _Questions:
    """Answers to the items of a suite's tasks: stored answers, and the server's where one is missing.

    The server and lm-eval start when they are first needed. ``asked`` counts the items that the server was asked, by
    task.
    """

    def __init__(self, job: Job, stage: EvaluateStage) -> None:
        self.asked: dict[str, int] = {}
        self._job = job
        self._stage = stage
        self._stack = ExitStack()
        self._server: RunningServer | None = None
        self._loaded: dict[str, Mapping[str, Any]] = {}
        self._known: dict[str, KnownAnswers] = {}
        self._in_harness: set[str] = set()

    def __enter__(self) -> _Questions:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @cached_property
    def _lm(self) -> Harness:
        job, setting = self._job, self._job.setting
        tokenizer = model_folder(job.inputs["model"])
        self._server = job.servers.get(self._stage.side, launch_plan(setting, self._stage.side, tokenizer))
        concurrency = setting.recipe.evaluation.concurrency
        opened = open_harness(job, self._server, tokenizer, setting.suite.tasks, concurrency=concurrency)
        return self._stack.enter_context(opened)

    def load(self, task: SuiteTask) -> Mapping[str, Sequence[str]]:
        """Load a task's documents, stored or through lm-eval, and return what `documents` returns."""
        stored = known_answers(self._job, self._stage, task)
        loaded = stored.documents()
        if loaded is None:
            loaded = self._ready(task)
            commits = lm_eval.data_commits(self._job.setting, task)
            if all(data["path"] in commits for data in loaded["datasets"]):
                stored.keep_documents(loaded)
            else:
                stored = KnownAnswers(lm_eval.batches(self._job.path) / task.task)
        self._loaded[task.task], self._known[task.task] = loaded, stored
        return self.documents(task)

    def documents(self, task: SuiteTask) -> Mapping[str, Sequence[str]]:
        """Return the cluster of each document of a loaded task, by leaf task; the index is the document's id."""
        documents: Mapping[str, Sequence[str]] = self._loaded[task.task]["documents"]
        return documents

    def datasets(self, task: SuiteTask) -> Any:
        """Return the Hub's data sets that a loaded task's documents come from, as lm-eval reported them."""
        return self._loaded[task.task]["datasets"]

    def answers(self, task: SuiteTask, items: Sequence[Item], planned: int, advance: Callable[[int], None]) -> Asked:
        """Return the answers to ``items`` of a loaded task; new ones are stored in batches of a share of ``planned``.

        ``advance`` is called with the number of items answered since its last call. Raises `MeasurementError` where
        answers with different settings cannot be joined.
        """
        stored = self._known[task.task]
        batches = stored.find(items)
        missing = _missing(items, batches)
        advance(len(items) - len(missing))
        while missing:
            if task.task not in self._in_harness:
                self._ready(task)
            for chunk in chunks(missing, planned):
                batch = self._lm.ask(task, chunk, advance)
                stored.keep(batch, chunk, self._server_faults())
                self.asked[task.task] = self.asked.get(task.task, 0) + len(chunk)
            batches, before = stored.find(items), missing
            missing = _missing(items, batches)  # those that were asked in another way than the newest
            if missing == before:
                raise MeasurementError(f"{task.task}: no two batches of items were asked in the same way")
        return joined(batches)

    def faults(self) -> list[str]:
        """Return the servers' log lines that void a measurement, of all servers that gave these answers."""
        recorded = [fault for stored in self._known.values() for fault in stored.faults()]
        return list(dict.fromkeys([*recorded, *self._server_faults()]))

    def _ready(self, task: SuiteTask) -> Mapping[str, Any]:
        self._in_harness.add(task.task)
        return self._lm.load(task)

    def _server_faults(self) -> list[str]:
        if self._server is None:
            return []
        return faults(keep_log(self._server, self._job.path / SERVER_LOG))


def _missing(items: Sequence[Item], batches: Sequence[Asked]) -> list[Item]:
    answered = {(sample.task, sample.doc_id) for batch in batches for sample in batch.samples}
    return [item for item in items if item not in answered]


def read_samples(folder: Path, task: SuiteTask) -> SampleSet:
    """Return the samples that an evaluate or control stage recorded for a task in ``folder``."""
    return SampleSet.from_json(read_json(lm_eval.samples_file(folder, task)))


def guessing(folder: Path, task: SuiteTask) -> float | None:
    """Return the expected score of guessing on a task: the mean of 1 / choices over its answers in ``folder``.

    None without recorded answers, and where an item has no choices.
    """
    path = folder / ANSWERS / f"{task.task}.jsonl.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        choices = [json.loads(line).get("choices") for line in lines]
    return math.fsum(1 / len(options) for options in choices) / len(choices) if choices and all(choices) else None


def _require_whole(task: SuiteTask, documents: Mapping[str, Sequence[str]]) -> None:
    """Raise `MeasurementError` where ``documents`` are fewer than the suite counts, as when a leaf task is missing.

    The loss that the items can show was computed from the suite's count. A task that is not gated needs one document.
    """
    count = sum(map(len, documents.values()))
    if count < (task.items if task.gated else 1):
        raise MeasurementError(
            f"{task.task}: found {count:,} items, the suite counts {task.items:,}; "
            "another version of lm-eval or of the data has others"
        )


def _evaluate(job: Job, task: SuiteTask, questions: _Questions, baseline: SampleSet | None) -> None:
    """Ask a task look by look until ``baseline`` decides it or all items are answered; record samples and answers.

    Without ``baseline`` all items are asked.
    """
    evaluation = job.setting.recipe.evaluation
    documents = questions.documents(task)
    looks = draw.draw(documents, looks=evaluation.looks, seed=evaluation.seed, limit=evaluation.limit)
    planned = sum(map(len, looks))
    in_looks = f" in {len(looks)} looks" if len(looks) > 1 else ""
    job.progress.say(f"{task.task}: {planned:,} items{in_looks}")
    parts: list[Asked] = []
    decision: str | None = None
    with job.progress.bar(planned, f"{task.task} items") as advance:
        for number, items in enumerate(looks):
            answered = questions.answers(task, items, planned, advance)
            parts.append(replace(answered, samples=tuple(replace(sample, look=number) for sample in answered.samples)))
            samples = _together(job.setting, task, parts, planned, len(looks))
            decision = None if baseline is None else _decision(job, task, baseline, samples)
            if decision is not None:
                break
    reused = len(samples.samples) - questions.asked.get(task.task, 0)
    if reused:
        job.progress.say(f"{task.task}: {reused:,} of {len(samples.samples):,} answers were known from earlier runs")
    if decision is not None:
        job.progress.say(f"{task.task}: {decision} after {len(samples.samples):,} of {planned:,} items")
    write_json(job.path / DATASETS / f"{task.task}.json", questions.datasets(task))
    answers = [answer for part in parts for answer in part.answers]
    if answers:
        (job.path / ANSWERS / f"{task.task}.jsonl.gz").write_bytes(compressed(answers))
    write_json(lm_eval.samples_file(job.path, task), samples.to_json())


def _together(setting: Setting, task: SuiteTask, parts: list[Asked], planned: int, looks: int) -> SampleSet:
    settings = common_settings(parts, f"{task.task}: looks")
    return SampleSet(
        task.task,
        task.metric,
        tuple(sample for part in parts for sample in part.samples),
        task.kind,
        planned,
        looks,
        {**settings, "limit": setting.recipe.evaluation.limit},
    )


def _decision(job: Job, task: SuiteTask, baseline: SampleSet, samples: SampleSet) -> str | None:
    """Return the words for the decision that ends a task early, None where asking continues.

    Sides that cannot be compared end it too, with a warning: more answers would not change that, and the gate judges
    it.
    """
    accuracy = job.setting.recipe.gate.accuracy
    margin = margin_in_units(task.kind, task.margin or accuracy.margin)
    try:
        *_, last = sequential.decide(pair(baseline, samples), margin, accuracy.confidence)
    except MeasurementError as error:
        job.progress.warn(str(error))
        return "not comparable with the baseline"
    return None if last.decision == "GO ON" else last.decision


def _summary(samples: SampleSet, baseline: SampleSet | None) -> str:
    """Return a task's score as text, beside the baseline's score on the same items, which may be fewer than planned."""
    shown = "{:.2%}" if samples.kind == "score" else "{:.3f}"
    count = len(samples.samples)
    early = f" after {count:,} of {samples.planned:,} items" if count < samples.planned else ""
    comparison = f" (baseline {shown.format(baseline.on(samples).mean)} on these)" if baseline else ""
    return f"{samples.task} {shown.format(samples.mean)}{early}{comparison}"


# Prompts in one HTTP request: unlike the evaluation's, so that requests meet in other groups.
_BATCH_SIZE = 20


class ControlStage(Stage):
    """Ask the baseline some items a second time, to measure how many answers flip by chance.

    Recipes of a model share it.
    """

    family = "control"
    version = 1
    asks_server = True
    measures = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe sets `evaluation.control`."""
        return super().is_planned(setting) and setting.recipe.evaluation.control is not None

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of lm-eval and of the runtime."""
        return (*HARNESS_MODULES, *runtime_modules(setting))

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`."""
        return (require_server,)

    def seconds(self, estimate: Estimate) -> float:
        """Return the time of the items that are asked a second time."""
        items = control_items(estimate.setting)
        return sum(count * estimate.item_seconds[name] for name, count in items.items())

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage keys of the baseline's server (`serve`), answers (`baseline`) and model (`model`)."""
        return {"serve": "serve-baseline", "baseline": "evaluate-baseline", "model": "source"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the tasks by content, and the number of items."""
        return {**lm_eval.task_settings(setting, *_scored(setting)), "control": setting.recipe.evaluation.control}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the harness, the tokenizer and the runtime."""
        return {**versions("lm-eval", "transformers", "datasets"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Ask some items of each task's first look again, and count the answers that differ."""
        setting = job.setting
        tasks = _scored(setting)
        if not tasks:
            return Output(result={"flips": {}}, summary="no task has answers that could flip")
        tokenizer = model_folder(job.inputs["model"])
        server = job.servers.get("baseline", launch_plan(setting, "baseline", tokenizer))
        concurrency = max(1, setting.recipe.evaluation.concurrency // 2)
        (job.path / lm_eval.SAMPLES).mkdir(exist_ok=True)
        flips: dict[str, list[int]] = {}
        with open_harness(job, server, tokenizer, tasks, concurrency=concurrency, batch_size=_BATCH_SIZE) as lm:
            for task in tasks:
                baseline = read_samples(job.inputs["baseline"].path, task)
                first = [(sample.task, sample.doc_id) for sample in baseline.samples if sample.look == 0]
                evaluation = setting.recipe.evaluation
                items = draw.some(first, evaluation.control or len(first), evaluation.seed)
                lm.load(task)
                with job.progress.bar(len(items), f"{task.task} items") as advance:
                    answers = read_asked(lm.ask(task, items, advance))
                settings = {**answers.settings, "limit": setting.recipe.evaluation.limit}
                again = SampleSet(task.task, task.metric, answers.samples, task.kind, settings=settings)
                pairs = pair(baseline.on(again), again)
                changed = sum(a != b for a, b in zip(pairs.baseline, pairs.candidate, strict=True))
                flips[task.task] = [changed, len(items)]
                write_json(lm_eval.samples_file(job.path, task), again.to_json())
        lm_eval.tidy(job.path)
        return Output(
            result={"flips": flips},
            summary=", ".join(f"{name}: {changed} of {items} flip" for name, (changed, items) in flips.items()),
        )


def _scored(setting: Setting) -> list[SuiteTask]:
    """Return the tasks whose single answers can flip, which excludes perplexity tasks."""
    return [task for task in setting.suite.tasks if task.kind == "score"]
