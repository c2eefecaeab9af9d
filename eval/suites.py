"""Evaluation suites: which lm-eval tasks are run, by which metric they count, how many items they have.

A suite is a YAML file in this folder's `suites/`. The number of items is written down, because the power of the gate
must be known before anything is run.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from eval import prompts
from eval.definitions import Section, read
from eval.errors import DefinitionError
from eval.power import detectable_margin, detectable_mean, items_needed, mean_items_needed
from eval.samples import Kind

FOLDER = Path(__file__).parent / "suites"
TASKS_FOLDER = Path(__file__).parent / "tasks"

_SUITE_KEYS = ("name", "description", "expected_flip_rate", "canary", "tasks")
_TASK_KEYS = (
    "task",
    "metric",
    "filter",
    "items",
    "gated",
    "margin",
    "expected_flip_rate",
    "expected_spread",
    "cluster",
    "num_fewshot",
    "max_gen_tokens",
    "chat",
    "data",
)

_DATA = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

# Metrics that lm-eval logs as (log likelihood, words or bytes).
_PERPLEXITIES = ("word_perplexity", "byte_perplexity")


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One lm-eval task of a suite, or one group of tasks.

    `items` is the number of samples that the task is expected to have, `margin` its own accuracy margin as a fraction
    (None: the recipe's; of a perplexity it is relative: 0.02 is two per cent more), `expected_flip_rate` the share of
    items whose score changes under a good quantization; of a perplexity, `expected_spread` is the standard deviation
    between documents of that change, in nats per word. `cluster` names the document's field whose equal values mean a
    passage that items share. `gated` tasks decide the verdict; the others are reported only. `data` are the data sets
    of the Hub that the task reads, as org/name, or org/name@revision where another than `main` is meant.
    """

    task: str
    metric: str
    items: int
    expected_flip_rate: float
    gated: bool = True
    filter: str = "none"
    margin: float | None = None
    num_fewshot: int | None = None
    max_gen_tokens: int | None = None
    chat: bool = False
    cluster: str | None = None
    expected_spread: float | None = None
    data: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """What its metric is: a score of each item, or the perplexity of a text."""
        return "perplexity" if self.metric in _PERPLEXITIES else "score"

    def detectable(self, confidence: float = 0.95, power: float = 0.8, looks: int = 1) -> float:
        """Smallest margin that a lossless candidate clears with probability `power`; relative of a perplexity."""
        if self.expected_spread is None:
            return detectable_margin(self.items, self.expected_flip_rate, confidence, power, looks=looks)
        return math.expm1(detectable_mean(self.items, self.expected_spread, confidence, power, looks=looks))

    def items_needed(self, margin: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1) -> int:
        """Items that make a margin testable."""
        if self.expected_spread is None:
            return items_needed(margin, self.expected_flip_rate, confidence, power, looks=looks)
        return mean_items_needed(math.log1p(margin), self.expected_spread, confidence, power, looks=looks)


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of tasks, and the prompts that the canary reads before them (a set of `eval.prompts`)."""

    name: str
    description: str
    tasks: tuple[SuiteTask, ...]
    canary: str = "general"

    def judged_by(self, margins: Mapping[str, float | None]) -> Suite:
        """The suite with other margins for some of its tasks; a task with None is shown only. Other names mean none."""
        tasks = tuple(
            replace(task, margin=margins[task.task], gated=margins[task.task] is not None)
            if task.task in margins
            else task
            for task in self.tasks
        )
        return replace(self, tasks=tasks)


def located(data: str) -> tuple[str, str]:
    """Repository and revision of a task's `data`."""
    repo, _, revision = data.partition("@")
    return repo, revision or "main"


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the suites in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(name: str, folder: Path = FOLDER) -> Suite:
    """Load a suite by its name.

    Raises `DefinitionError` with the nearest existing name, or with file, line and key of what is wrong in it.
    """
    path = folder / f"{name}.yaml"
    if name not in names(folder):
        near = difflib.get_close_matches(name, names(folder), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names(folder))}"
        raise DefinitionError(f"no suite {name!r} in {folder}; {hint}")
    return parse(path)


def parse(path: Path) -> Suite:
    """Load a suite from any file."""
    root = read(path)
    root.only(_SUITE_KEYS)
    if root.need("name", str) != path.stem:
        raise root.error(f"'name' must be the file's name, {path.stem!r}", "name")
    flip_rate = root.fraction("expected_flip_rate")
    if flip_rate is None:
        raise root.error("missing key 'expected_flip_rate', expected a number between 0 and 1")
    tasks = tuple(_task(section, flip_rate) for section in root.sections("tasks"))
    seen: set[str] = set()
    for section, task in zip(root.sections("tasks"), tasks, strict=True):
        if task.task in seen:
            raise section.error(f"task {task.task!r} appears twice", "task")
        seen.add(task.task)
    if not any(task.gated for task in tasks):
        raise root.error("no task is gated, so the suite cannot decide anything", "tasks")
    canary = root.get("canary", str) or "general"
    try:
        prompts.load(canary)
    except DefinitionError as error:
        raise root.error(str(error), "canary") from error
    return Suite(root.need("name", str), root.need("description", str), tasks, canary)


def _task(section: Section, flip_rate: float) -> SuiteTask:
    section.only(_TASK_KEYS)
    gated = section.get("gated", bool)
    fewshot = section.count("num_fewshot", least=0) if section.get("num_fewshot", int) is not None else None
    tokens = section.count("max_gen_tokens") if section.get("max_gen_tokens", int) is not None else None
    spread = section.fraction("expected_spread")
    if (spread is None) == (section.need("metric", str) in _PERPLEXITIES):
        wanted = (
            "needs 'expected_spread'" if spread is None else "has no 'expected_spread', expected 'expected_flip_rate'"
        )
        raise section.error(f"metric {section.need('metric', str)!r} {wanted}", "metric")
    return SuiteTask(
        task=section.need("task", str),
        metric=section.need("metric", str),
        items=section.count("items"),
        expected_flip_rate=section.fraction("expected_flip_rate") or flip_rate,
        gated=True if gated is None else gated,
        filter=section.get("filter", str) or "none",
        margin=section.fraction("margin"),
        num_fewshot=fewshot,
        max_gen_tokens=tokens,
        chat=section.get("chat", bool) or False,
        cluster=section.get("cluster", str),
        expected_spread=spread,
        data=_data(section),
    )


def _data(section: Section) -> tuple[str, ...]:
    found = section.values.get("data")
    if not isinstance(found, list | None):
        raise section.error(f"'data' must be a list of data sets, found {found!r}", "data")
    for item in found or ():
        if not (isinstance(item, str) and _DATA.fullmatch(item)):
            raise section.error(f"found the data set {item!r}, expected org/name or org/name@revision", "data")
    return tuple(found or ())


def untestable(
    suite: Suite, margin: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1
) -> tuple[str, ...]:
    """One sentence for each gated task whose margin is smaller than its size can test; empty when all can be.

    `margin` is the recipe's, as a fraction; a task's own margin goes before it. `looks` is how often the items are
    judged while they are asked, which costs a little power.
    """
    sentences = []
    for task in suite.tasks:
        wanted = task.margin or margin
        smallest = task.detectable(confidence, power, looks)
        if task.gated and wanted < smallest:
            needed = task.items_needed(wanted, confidence, power, looks)
            expected = f"flip rate {task.expected_flip_rate:.1%}"
            if task.expected_spread is not None:
                expected = f"spread between documents {task.expected_spread:.1%}"
            sentences.append(
                f"{task.task}: {task.items} items can test a margin of {smallest:.2%} or wider, not {wanted:.2%}, "
                f"which needs {needed} items ({expected}, confidence {confidence:.0%}, power {power:.0%})"
            )
    return tuple(sentences)
