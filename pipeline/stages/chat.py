"""Measurements through a server's chat endpoint: items are asked look by look, as the tasks of a suite are.

A stage names its items and how an answer is scored; one answer may be scored in several ways, each a task of the gate.
The baseline answers all items, and the first ones a second time, which shows how many answers change by themselves. The
candidate is asked until each task that decides is decided.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from quantmint.eval import harness as draw
from quantmint.eval.accuracy import margin_in_units
from quantmint.eval.chat import ChatAnswer, ChatItem
from quantmint.eval.errors import DefinitionError, MeasurementError
from quantmint.eval.harness import Asked, Item, compressed, joined, write_asked
from quantmint.eval.samples import SampleSet, pair
from quantmint.eval.statistics import sequential
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.faults import Fault
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.answers import KnownAnswers, answers_to, chunks
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.evaluate import ANSWERS, read_samples
from quantmint.pipeline.stages.paired import PairedStage
from quantmint.pipeline.stages.serve import (
    SERVER_LOG,
    faults,
    keep_log,
    launch_plan,
    runtime_tools,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output
from quantmint.pipeline.stages.stage import write_json as write
from quantmint.pipeline.store.disk import sha256_of

AGAIN = "again"
"""Folder of a baseline's samples of the items that it was asked a second time."""
_TIMEOUT_S = 3600.0
_SHOWN = 4000
"""Characters of an answer that are kept for a reader."""


class ChatStage(PairedStage):
    """Ask a side the items of an endpoint by chat; stored answers that were asked in the same way are reused."""

    repeats: ClassVar[bool] = True
    """Whether an answer that changes when it is asked again tells something: not where answers are sampled."""

    @abstractmethod
    def items(self, setting: Setting) -> Sequence[ChatItem]:
        """Return all items, in the order of their numbers. Raises `DefinitionError` for a file that is none."""

    @abstractmethod
    def request(self, setting: Setting, folder: Path) -> Mapping[str, object]:
        """Return the part of a request that all items share; ``folder`` is that of the side's model."""

    def item_request(self, setting: Setting, item: ChatItem) -> Mapping[str, object]:
        """Return the part of a request that is an item's own; by default nothing."""
        return {}

    @abstractmethod
    def scores(self, item: ChatItem, answers: Sequence[ChatAnswer]) -> Mapping[str, float]:
        """Return the score of an item by task, from all answers to it."""

    @abstractmethod
    def shown(self, answers: Sequence[ChatAnswer]) -> str:
        """Return the answers to an item as text for a reader."""

    @abstractmethod
    def plan_settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the parts of the recipe that shape the answers, for the fingerprint, besides the items."""

    @abstractmethod
    def item_seconds(self, estimate: Estimate) -> float:
        """Return the forecast seconds of one item, with the recipe's requests in flight."""

    def tasks(self, setting: Setting) -> tuple[SuiteTask, ...]:
        """Return the tasks that the answers are scored by; the first names the endpoint."""
        return setting.recipe.endpoints[self.family]

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe has this endpoint."""
        return super().is_planned(setting) and self.family in setting.recipe.endpoints

    def asking(self, setting: Setting) -> Mapping[str, object]:
        """Return the settings that shape the answers beside server, model and tools."""
        evaluation, file = setting.recipe.evaluation, setting.loaded.items_file(self.family)
        return {
            **self.plan_settings(setting),
            **({} if file is None else {"file": sha256_of(file)}),
            "seed": evaluation.seed,
            "concurrency": evaluation.concurrency,
            "max_length": setting.recipe.target.max_model_len,
            "template": dict(evaluation.chat_template_kwargs),
        }

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the items, how they are asked, and the limits that end the endpoint early."""
        evaluation = setting.recipe.evaluation
        control = evaluation.control if self.side == "baseline" and self.repeats else None
        shared = {**self.asking(setting), "looks": evaluation.looks, "control": control}
        if self.side == "baseline":
            return shared
        margins = {task.task: task.margin for task in self.tasks(setting) if task.gated}
        return {**shared, "policy": {"margins": margins, "confidence": setting.recipe.gate.accuracy.confidence}}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the runtime."""
        return runtime_tools(setting)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of all items for the baseline, or of those that a lossless candidate is asked."""
        tasks = self.tasks(estimate.setting)
        items = float(tasks[0].items)
        if self.side == "candidate":
            items = min(items, max((estimate.expected.get(task.task) or items) for task in tasks))
        elif self.repeats:
            items += min(
                items / estimate.setting.recipe.evaluation.looks, estimate.setting.recipe.evaluation.control or 0
            )
        return items * self.item_seconds(estimate)

    def run(self, job: Job) -> Output:
        """Ask the items and record samples, answers and scores; the server starts only where an answer is missing.

        Raises `MeasurementError` where items cannot be read, or were answered in two ways.
        """
        setting = job.setting
        for folder in (lm_eval.SAMPLES, ANSWERS):
            (job.path / folder).mkdir(exist_ok=True)
        questions, tasks = _ItemAnswers(job, self), self.tasks(setting)
        sets, answered = self._looks(job, questions)
        for task in tasks:
            write(lm_eval.samples_file(job.path, task), sets[task.task].to_json())
            shown = ({**row, "task": task.task} for row in answered.answers)
            (job.path / ANSWERS / f"{task.task}.jsonl.gz").write_bytes(compressed(shown))
        flips = self._again(job, questions, sets) if self.side == "baseline" and self.repeats else {}
        scores = {task.task: sets[task.task].mean for task in tasks}
        words = ", ".join(f"{name} {score:.2%}" for name, score in scores.items())
        count, planned = len(answered.answers), sets[tasks[0].task].planned
        early = f" after {count:,} of {planned:,} items" if count < planned else ""
        return Output(
            result={
                "scores": scores,
                "items": {task.task: [count, planned] for task in tasks},
                "asked": questions.asked,
                "flips": flips,
                "faults": questions.faults(),
            },
            summary=f"{words}{early}",
        )

    def _looks(self, job: Job, questions: _ItemAnswers) -> tuple[dict[str, SampleSet], Asked]:
        """Ask look by look until all tasks are decided, or all items are answered; return samples by task, answers."""
        evaluation, tasks = job.setting.recipe.evaluation, self.tasks(job.setting)
        looks = draw.draw({self.family: [""] * tasks[0].items}, looks=evaluation.looks, seed=evaluation.seed)
        before = {}
        if self.side == "candidate" and len(looks) > 1:
            before = {t.task: read_samples(job.inputs["baseline"].path, t) for t in tasks if t.gated}
        parts: list[Asked] = []
        sets: dict[str, SampleSet] = {}
        planned = sum(map(len, looks))
        with job.progress.bar(planned, f"{tasks[0].task} items") as advance:
            for number, items in enumerate(looks):
                answered = questions.answers(items, planned, advance)
                parts.append(replace(answered, samples=tuple(replace(s, look=number) for s in answered.samples)))
                sets = {task.task: self._scored(task, parts, planned, len(looks)) for task in tasks}
                if before and all(
                    _decided(job, task, before[task.task], sets[task.task]) for task in tasks if task.gated
                ):
                    break
        return sets, joined(parts)

    def _again(self, job: Job, questions: _ItemAnswers, sets: Mapping[str, SampleSet]) -> dict[str, list[int]]:
        """Ask some items of the first look a second time; write their samples, return (flips, items) by task."""
        evaluation, tasks = job.setting.recipe.evaluation, self.tasks(job.setting)
        if evaluation.control is None:
            return {}
        first = [(self.family, s.doc_id) for s in sets[tasks[0].task].samples if s.look == 0]
        items = draw.some(first, evaluation.control, evaluation.seed)
        with job.progress.bar(len(items), f"{tasks[0].task} items again") as advance:
            answered = questions.question(items, advance, in_flight=max(1, evaluation.concurrency // 2))
        flips = {}
        (job.path / AGAIN).mkdir(exist_ok=True)
        for task in tasks:
            again = self._scored(task, [answered], len(items), 1)
            pairs = pair(sets[task.task].on(again), again)
            flips[task.task] = [sum(a != b for a, b in zip(pairs.baseline, pairs.candidate, strict=True)), len(items)]
            write(job.path / AGAIN / f"{task.task}.json", again.to_json())
        return flips

    def _scored(self, task: SuiteTask, parts: Sequence[Asked], planned: int, looks: int) -> SampleSet:
        scores = {row["doc_id"]: row["scores"][task.task] for part in parts for row in part.answers}
        samples = [replace(s, task=task.task, score=scores[s.doc_id]) for part in parts for s in part.samples]
        samples.sort(key=lambda sample: sample.doc_id)
        settings = {**draw.common_settings(parts, "items")}
        return SampleSet(task.task, task.metric, tuple(samples), task.kind, planned, looks, settings)


def _decided(job: Job, task: SuiteTask, baseline: SampleSet, samples: SampleSet) -> bool:
    """Return whether a look decided a task; sides that cannot be compared are left to the gate, with a warning."""
    accuracy = job.setting.recipe.gate.accuracy
    margin = margin_in_units(task.kind, task.margin or accuracy.margin)
    try:
        *_, last = sequential.decide(pair(baseline, samples), margin, accuracy.confidence)
    except MeasurementError as error:
        job.progress.warn(str(error))
        return True
    return last.decision != "GO ON"


class _ItemAnswers:
    """Answers to the items of an endpoint: stored ones, and the server's where one is missing."""

    def __init__(self, job: Job, stage: ChatStage) -> None:
        self.asked = 0
        self._job = job
        self._stage = stage
        self._stored: KnownAnswers = answers_to(job, stage, stage.family, stage.asking(job.setting))
        self._server: RunningServer | None = None

    @cached_property
    def _items(self) -> Sequence[ChatItem]:
        items = self._stage.items(self._job.setting)
        expected = self._stage.tasks(self._job.setting)[0].items
        if len(items) != expected:
            raise MeasurementError(f"{self._stage.family}: found {len(items):,} items, the recipe counts {expected:,}")
        return items

    @cached_property
    def _folder(self) -> Path:
        return model_folder(self._job.inputs["model"])

    @cached_property
    def _request(self) -> Mapping[str, object]:
        return self._stage.request(self._job.setting, self._folder)

    def answers(self, items: Sequence[Item], planned: int, advance: Callable[[int], None]) -> Asked:
        """Return the answers to items; new ones are stored in batches of a share of ``planned``.

        ``advance`` is called with the number of items answered since its last call.
        """
        batches = self._stored.find(items)
        answered = {row["doc_id"] for batch in batches for row in batch.answers}
        missing = [item for item in items if item[1] not in answered]
        advance(len(items) - len(missing))
        for chunk in chunks(missing, planned):
            path = self._job.path / "batch.jsonl.gz"
            write_asked(path, self.question(chunk, advance, in_flight=self._job.setting.recipe.evaluation.concurrency))
            self._stored.keep(path, chunk, self._server_faults())
        return joined(self._stored.find(items))

    def question(self, items: Sequence[Item], advance: Callable[[int], None], *, in_flight: int) -> Asked:
        """Ask the server items, ``in_flight`` at a time, and return the scored answers."""
        job, stage = self._job, self._stage
        self._server = server = job.servers.get(stage.side, launch_plan(job.setting, stage.side, self._folder))
        # What must be 0 of every task that is not sampled is where the gate looks for it.
        greedy = {"temperature": self._request["temperature"]} if stage.repeats else {}
        template = dict(job.setting.recipe.evaluation.chat_template_kwargs)
        settings = {**greedy, "request": dict(self._request), "chat_template_kwargs": template}
        samples, rows = [], []
        pool = ThreadPoolExecutor(max_workers=in_flight)
        try:
            chosen = [self._items[number] for _, number in items]
            for item, answers in zip(chosen, pool.map(lambda item: self._complete(server, item), chosen), strict=True):
                samples.append(item.sample(stage.family, 0.0))
                rows.append(_row(stage, item, answers))
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
        self.asked += len(items)
        return Asked(settings, tuple(samples), tuple(rows))

    def _complete(self, server: RunningServer, item: ChatItem) -> tuple[ChatAnswer, ...]:
        template = dict(self._job.setting.recipe.evaluation.chat_template_kwargs)
        body = {
            "model": server.model_name,
            "messages": list(item.messages),
            **({"tools": list(item.tools)} if item.tools else {}),
            **({"chat_template_kwargs": template} if template else {}),
            **self._request,
            **self._stage.item_request(self._job.setting, item),
        }
        text = server.post("/v1/chat/completions", body, timeout=_TIMEOUT_S)
        try:
            response = json.loads(text)
            choices = sorted(response["choices"], key=lambda choice: choice["index"])
            tokens = int(response["usage"]["completion_tokens"]) // len(choices)
            return tuple(ChatAnswer.from_choice(choice, tokens) for choice in choices)
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise StageError(f"the server's answer by chat cannot be read: {error!r}: {text[:300]}") from error

    def faults(self) -> list[str]:
        """Return the log lines of the answering servers that void a measurement."""
        return list(dict.fromkeys([*self._stored.faults(), *self._server_faults()]))

    def _server_faults(self) -> list[str]:
        return [] if self._server is None else faults(keep_log(self._server, self._job.path / SERVER_LOG))


def _row(stage: ChatStage, item: ChatItem, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    return {
        "task": stage.family,
        "doc_id": item.number,
        "filter": "none",
        "prompt": item.prompt[-_SHOWN:],
        "target": item.target if isinstance(item.target, str) else json.dumps(item.target, ensure_ascii=False),
        "response": stage.shown(answers)[:_SHOWN],
        "scores": dict(stage.scores(item, answers)),
    }


def file_faults(
    loaded: LoadedRecipe, family: str, read: Callable[[Path], Sequence[ChatItem]], expected: int
) -> list[Fault]:
    """Return the faults of the file of items that `evaluation.<family>` names: what ``read`` refuses, another count."""
    file = loaded.items_file(family)
    if file is None:
        return []
    try:
        count = len(read(file))
    except DefinitionError as error:
        return [loaded.fault(("evaluation", family, "file"), str(error))]
    fault = f"found {expected}, expected {count}, the lines of {file.name}"
    return [] if count == expected else [loaded.fault(("evaluation", family, "items"), fault)]


def read_again(folder: Path, task: SuiteTask) -> SampleSet | None:
    """Return the samples of the items of a task that a baseline was asked a second time; None where none was."""
    path = folder / AGAIN / f"{task.task}.json"
    return SampleSet.from_json(read_json(path)) if path.is_file() else None


def measured_tasks(setting: Setting) -> Iterator[tuple[str, SuiteTask]]:
    """Yield (family of the measuring stage, task) of all tasks: the suite's first, then those of the endpoints."""
    yield from (("evaluate", task) for task in setting.suite.tasks)
    for family, tasks in setting.recipe.endpoints.items():
        yield from ((family, task) for task in tasks)


def families(setting: Setting) -> Iterable[str]:
    """Return the families of the stages that ask tasks."""
    return dict.fromkeys(family for family, _ in measured_tasks(setting))
