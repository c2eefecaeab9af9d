"""evaluate: the tasks of a suite against one side, look by look; control: the baseline asked some items again.

The baseline is asked everything. Of the candidate, a task that decides the verdict is held against the baseline after
each look and is over as soon as the boundary says PASS or FAIL (`eval.statistics.sequential`, which the gate reads the
same samples by). The baseline is evaluated without regard to a candidate, for all recipes of its model.

At temperature 0 a server is not deterministic: which requests share a batch decides how sums are rounded. The second
time fewer requests are in flight, in other groups. What flips then is the floor that a flip of the candidate stands on.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantmint.eval import harness as draw
from quantmint.eval.accuracy import margin_in_units
from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import Asked, compressed
from quantmint.eval.samples import SampleSet, pair
from quantmint.eval.statistics import sequential
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.lm_eval import Harness, open_harness
from quantmint.pipeline.stages.serve import SERVER_LOG, faults, keep_log, launch_plan, model_key, runtime_tools
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, Setting, SideStage, Stage, write_json
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here

ANSWERS = "answers"
DATASETS = "datasets"


class EvaluateStage(SideStage):
    """A look that was finished is not asked again after an interruption."""

    family = "evaluate"
    version = 2

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The server, for the model and its launch; the model for its tokenizer; what the candidate is held against."""
        against = {"baseline": "evaluate-baseline"} if self.side == "candidate" else {}
        return {"serve": f"serve-{self.side}", "model": model_key(self.side), **against}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The tasks by content, how they are asked, and by which limits asking stops."""
        evaluation, accuracy = setting.recipe.evaluation, setting.recipe.gate.accuracy
        found = {
            **lm_eval.task_settings(setting, *setting.suite.tasks),
            "limit": evaluation.limit,
            "looks": evaluation.looks,
        }
        if self.side == "candidate" and evaluation.looks > 1:
            margins = {task.task: task.margin or accuracy.margin for task in setting.suite.tasks if task.gated}
            found["policy"] = {"margins": margins, "confidence": accuracy.confidence}
        return found

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What asks, tokenizes and answers."""
        return {**versions("lm-eval", "transformers", "datasets"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """One task after the other, by one lm-eval process."""
        setting = job.setting
        tokenizer = model_folder(job.inputs["model"])
        unfinished = [task for task in setting.suite.tasks if not lm_eval.samples_file(job.path, task).is_file()]
        for folder in (lm_eval.SAMPLES, ANSWERS, DATASETS):
            (job.path / folder).mkdir(exist_ok=True)
        server = job.servers.get(self.side, launch_plan(setting, self.side, tokenizer))
        if unfinished:
            concurrency = setting.recipe.evaluation.concurrency
            with open_harness(job, server, tokenizer, unfinished, concurrency=concurrency) as lm:
                # All of them first: data that cannot be had is told before the first hour of asking.
                loaded = {task.task: lm.load(task) for task in unfinished}
                for task in unfinished:
                    _require_whole(task, loaded[task.task]["documents"])
                for task in unfinished:
                    held = self.side == "candidate" and task.gated and setting.recipe.evaluation.looks > 1
                    baseline = read_samples(job.inputs["baseline"].path, task) if held else None
                    _evaluate(job, task, lm, loaded[task.task], baseline)
        sets = {task.task: read_samples(job.path, task) for task in setting.suite.tasks}
        scores = {name: samples.mean for name, samples in sets.items()}
        lm_eval.tidy(job.path)
        write_json(job.path / ENVIRONMENT, environment_here(self.tools(setting)).to_json())
        scan = keep_log(server, job.path / SERVER_LOG)
        return Output(
            result={
                "scores": scores,
                "items": {name: [len(samples.samples), samples.planned] for name, samples in sets.items()},
                "datasets": {name: json.loads((job.path / DATASETS / f"{name}.json").read_text()) for name in sets},
                "faults": faults(scan),
            },
            summary=", ".join(
                _summary(samples, read_samples(job.inputs["baseline"].path, task) if "baseline" in job.inputs else None)
                for task, samples in zip(setting.suite.tasks, sets.values(), strict=True)
            ),
        )


def read_samples(folder: Path, task: SuiteTask) -> SampleSet:
    """The samples of a task that a stage has kept."""
    return SampleSet.from_json(read_json(lm_eval.samples_file(folder, task)))


def guessing(folder: Path, task: SuiteTask) -> float | None:
    """The score that guessing reaches on a task's items, by the choices that each has; None where one has none."""
    path = folder / ANSWERS / f"{task.task}.jsonl.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        choices = [json.loads(line).get("choices") for line in lines]
    return math.fsum(1 / len(each) for each in choices) / len(choices) if choices and all(choices) else None


def _require_whole(task: SuiteTask, documents: Mapping[str, Sequence[str]]) -> None:
    """Refuse a task that lacks items which the suite counts, such as a group without one of its leaf tasks.

    Which loss the items can show was read from the suite. A task that is shown only must not be empty.
    """
    found = sum(map(len, documents.values()))
    if found < (task.items if task.gated else 1):
        raise MeasurementError(
            f"{task.task}: found {found:,} items, the suite counts {task.items:,}; "
            "another version of lm-eval or of the data has others"
        )


def _evaluate(job: Job, task: SuiteTask, lm: Harness, loaded: Mapping[str, Any], baseline: SampleSet | None) -> None:
    """Ask a task until it is decided or over, and keep its samples and answers."""
    evaluation = job.setting.recipe.evaluation
    looks = draw.draw(loaded["documents"], looks=evaluation.looks, seed=evaluation.seed, limit=evaluation.limit)
    planned = sum(map(len, looks))
    in_looks = f" in {len(looks)} looks" if len(looks) > 1 else ""
    job.progress.say(f"{task.task}: {planned:,} items{in_looks}")
    asked: list[Asked] = []
    decision: str | None = None
    with job.progress.bar(planned, f"{task.task} items") as advance:
        for number, items in enumerate(looks):
            found = lm.ask(task, items, number, advance)
            asked.append(replace(found, samples=tuple(replace(sample, look=number) for sample in found.samples)))
            samples = _together(job.setting, task, asked, planned, len(looks))
            decision = None if baseline is None else _decision(job, task, baseline, samples)
            if decision is not None:
                break
    if decision is not None:
        job.progress.say(f"{task.task}: {decision} after {len(samples.samples):,} of {planned:,} items")
    write_json(job.path / DATASETS / f"{task.task}.json", loaded["datasets"])
    answers = [answer for part in asked for answer in part.answers]
    if answers:
        (job.path / ANSWERS / f"{task.task}.jsonl.gz").write_bytes(compressed(answers))
    write_json(lm_eval.samples_file(job.path, task), samples.to_json())  # the last: it says that the task is finished


def _together(setting: Setting, task: SuiteTask, asked: list[Asked], planned: int, looks: int) -> SampleSet:
    first, *rest = asked
    for part in rest:
        if part.settings != first.settings:
            raise MeasurementError(f"{task.task}: looks were asked as {dict(first.settings)}, {dict(part.settings)}")
    return SampleSet(
        task.task,
        task.metric,
        tuple(sample for part in asked for sample in part.samples),
        task.kind,
        planned,
        looks,
        {**first.settings, "limit": setting.recipe.evaluation.limit},
    )


def _decision(job: Job, task: SuiteTask, baseline: SampleSet, samples: SampleSet) -> str | None:
    """What ends a task early, in one word or one sentence; None where asking goes on.

    Sides that cannot be compared are the gate's to judge: more of the same answers would not change that.
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
    """A side's score, of the candidate beside the baseline's on the same items: it may have been asked fewer."""
    shown = "{:.2%}" if samples.kind == "score" else "{:.3f}"
    asked = len(samples.samples)
    early = f" after {asked:,} of {samples.planned:,} items" if asked < samples.planned else ""
    beside = f" (baseline {shown.format(baseline.on(samples).mean)} on these)" if baseline else ""
    return f"{samples.task} {shown.format(samples.mean)}{early}{beside}"


# Prompts in one HTTP request: unlike the evaluation's, so that requests meet in other groups.
_BATCH_SIZE = 20


class ControlStage(Stage):
    """Shared by all recipes of a model, like the baseline's evaluation."""

    family = "control"
    version = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The baseline's server, its answers, the model for its tokenizer."""
        return {"serve": "serve-baseline", "baseline": "evaluate-baseline", "model": "source"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """What is asked, and how many of it."""
        return {**lm_eval.task_settings(setting, *_scored(setting)), "control": setting.recipe.evaluation.control}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What asks, tokenizes and answers."""
        return {**versions("lm-eval", "transformers", "datasets"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Ask each task's items in one batch."""
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
                    asked = lm.ask(task, items, 0, advance)
                settings = {**asked.settings, "limit": setting.recipe.evaluation.limit}
                again = SampleSet(task.task, task.metric, asked.samples, task.kind, settings=settings)
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
    """Tasks whose items have answers that can flip; every document of a perplexity task changes a little."""
    return [task for task in setting.suite.tasks if task.kind == "score"]
