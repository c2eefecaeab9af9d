"""control: the baseline answers some items a second time, so that it is known how many answers change by themselves.

At temperature 0 a server is not deterministic: which requests share a batch decides how sums are rounded. The second
time fewer requests are in flight, in other groups. What flips here is the floor that a candidate's flips stand on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eval import draw
from eval.errors import DefinitionError, MeasurementError
from eval.samples import SampleSet, pair
from eval.suites import SuiteTask
from pipeline.errors import InvalidMeasurementError
from pipeline.stage import Job, Output, Setting, Stage, write_json
from pipeline.stages.asking import SAMPLES, asked_settings, asking, samples_file, tidy
from pipeline.stages.evaluate import read_samples
from pipeline.stages.serve import launch_plan, runtime_tools
from pipeline.stages.source import model_folder
from pipeline.versions import versions

# Prompts in one HTTP request: unlike the evaluation's, so that requests meet in other groups.
_BATCH_SIZE = 20


@dataclass(frozen=True, slots=True)
class ControlStage(Stage):
    """Shared by all recipes of a model, like the baseline's evaluation."""

    key: str = "control"
    family: str = "control"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The baseline's server, its answers, the model for its tokenizer."""
        return {"serve": "serve-baseline", "baseline": "evaluate-baseline", "model": "source"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """What is asked, and how many of it."""
        return {**asked_settings(setting, *_tasks(setting)), "control": setting.recipe.evaluation.control}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What asks, tokenizes and answers."""
        return {**versions("lm-eval", "transformers", "datasets"), **runtime_tools(setting)}

    def run(self, job: Job) -> Output:
        """Ask each task's items in one batch."""
        setting = job.setting
        tasks = _tasks(setting)
        if not tasks:
            return Output(result={"flips": {}}, summary="no task has answers that could flip")
        tokenizer = model_folder(job.inputs["model"])
        server = job.servers.get("baseline", launch_plan(setting, "baseline", tokenizer))
        concurrency = max(1, setting.recipe.evaluation.concurrency // 2)
        (job.path / SAMPLES).mkdir(exist_ok=True)
        flips: dict[str, list[int]] = {}
        try:
            with asking(job, server, tokenizer, tasks, concurrency=concurrency, batch_size=_BATCH_SIZE) as asker:
                for task in tasks:
                    baseline = read_samples(job.inputs["baseline"].path, task)
                    items = _items(setting, baseline)
                    asker.load(task)
                    with job.progress.bar(len(items), f"{task.task} items") as advance:
                        asked = asker.ask(task, items, 0, advance)
                    settings = {**asked.settings, "limit": setting.recipe.evaluation.limit}
                    again = SampleSet(task.task, task.metric, asked.samples, task.kind, settings=settings)
                    pairs = pair(baseline.on(again), again)
                    changed = sum(a != b for a, b in zip(pairs.baseline, pairs.candidate, strict=True))
                    flips[task.task] = [changed, len(items)]
                    write_json(samples_file(job.path, task), again.to_json())
        except (MeasurementError, DefinitionError) as error:
            raise InvalidMeasurementError(f"control: {error}") from error
        tidy(job.path)
        return Output(
            result={"flips": flips},
            summary=", ".join(f"{name}: {changed} of {items} flip" for name, (changed, items) in flips.items()),
        )


def _tasks(setting: Setting) -> list[SuiteTask]:
    """Tasks whose items have answers that can flip; every document of a perplexity task changes a little."""
    return [task for task in setting.suite.tasks if task.kind == "score"]


def _items(setting: Setting, baseline: SampleSet) -> tuple[draw.Item, ...]:
    first = [(sample.task, sample.doc_id) for sample in baseline.samples if sample.look == 0]
    evaluation = setting.recipe.evaluation
    return draw.some(first, evaluation.control or len(first), evaluation.seed)
