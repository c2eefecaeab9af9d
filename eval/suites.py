"""Evaluation suites: which lm-eval tasks are run, by which metric they count, how many items they have.

A suite is a YAML file in this folder's `suites/`, whose own tasks lie in `tasks/`; or one by its path, whose own tasks
lie beside it. The number of items is written down, because the power of the gate must be known before anything is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from quantmint.eval import prompts, records
from quantmint.eval.errors import DefinitionError
from quantmint.eval.foreign import untrusted
from quantmint.eval.power import (
    detectable_margin,
    detectable_mean,
    items_needed,
    mean_items_needed,
    mean_passes,
    outcome,
)
from quantmint.eval.records import Document, Record, read
from quantmint.eval.samples import Kind

FOLDER = Path(__file__).parent / "suites"
TASKS_FOLDER = Path(__file__).parent / "tasks"
Share = Annotated[float, Field(gt=0, lt=1)]

TaskName = Annotated[str, Field(pattern=r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$")]
"""Name of a task, and of the file beside a suite that may define it: no path."""

# Metrics that lm-eval logs as (log likelihood, words or bytes), and ours by token.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "token_perplexity")


@dataclass(frozen=True, slots=True)
class SuiteTask(Record):
    """One lm-eval task of a suite, or one group of tasks.

    `items` is the number of samples that the task is expected to have, `margin` its own accuracy margin as a fraction
    (None: the recipe's; of a perplexity it is relative: 0.02 is two per cent more), `expected_flip_rate` the share of
    items whose score changes under a good quantization; of a perplexity, `expected_spread` is the standard deviation
    between documents of that change, in nats per word. `cluster` names the document's field whose equal values mean a
    passage that items share. `gated` tasks decide the verdict; the others are reported only. `data` are the data sets
    of the Hub that the task reads, as org/name, or org/name@revision where another than `main` is meant.
    """

    task: TaskName
    metric: str
    items: Annotated[int, Field(ge=1)]
    expected_flip_rate: Share
    gated: bool = True
    filter: str = "none"
    margin: Share | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    max_gen_tokens: Annotated[int, Field(ge=1)] | None = None
    chat: bool = False
    cluster: str | None = None
    expected_spread: Share | None = None
    data: tuple[Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")], ...] = ()

    @property
    def kind(self) -> Kind:
        """Return the kind of its metric: a score of each item, or the perplexity of a text."""
        return "perplexity" if self.metric in _PERPLEXITIES else "score"

    def detectable(self, confidence: float = 0.95, power: float = 0.8, looks: int = 1) -> float:
        """Return the smallest margin that a lossless candidate clears with probability `power`.

        It is a fraction; of a perplexity it is relative. `looks` is how often the items are judged while they are
        asked.
        """
        if self.expected_spread is None:
            return detectable_margin(self.items, self.expected_flip_rate, confidence, power, looks=looks)
        return math.expm1(detectable_mean(self.items, self.expected_spread, confidence, power, looks=looks))

    def passes(self, margin: float, confidence: float = 0.95, looks: int = 1) -> float:
        """Return the chance that a lossless candidate clears `margin`, a fraction (of a perplexity: relative)."""
        if self.expected_spread is None:
            return outcome(self.items, looks, margin, self.expected_flip_rate, confidence=confidence).passes
        return mean_passes(self.items, math.log1p(margin), self.expected_spread, confidence, looks)

    def items_needed(self, margin: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1) -> int:
        """Return the number of items that a lossless candidate needs to clear `margin` with probability `power`."""
        if self.expected_spread is None:
            return items_needed(margin, self.expected_flip_rate, confidence, power, looks=looks)
        return mean_items_needed(math.log1p(margin), self.expected_spread, confidence, power, looks=looks)


@dataclass(frozen=True, slots=True)
class Suite(Record):
    """A named list of tasks, and the prompts that the canary reads before them (a set of `eval.prompts`).

    `path` is the file that defines the suite.
    """

    name: str
    description: str
    tasks: Annotated[tuple[SuiteTask, ...], Field(min_length=1)]
    canary: str = "general"
    path: Path = FOLDER / ".yaml"

    @property
    def own_tasks(self) -> Path:
        """Return the folder with the definitions of the suite's own tasks.

        For a shipped suite it is `tasks/` of this package, for any other suite the folder of its file.
        """
        return TASKS_FOLDER if self.path.parent == FOLDER else self.path.parent

    def files(self, task: SuiteTask) -> tuple[Path, ...]:
        """Return the paths of a task's definition and of its data files; empty for a task that lm-eval defines."""
        task_definition = definition(self.own_tasks, task.task)
        return (
            ()
            if task_definition is None
            else (task_definition.path, *(file for files in data_files(task_definition).values() for file in files))
        )

    def judged_by(self, margins: Mapping[str, float | None]) -> Suite:
        """Return the suite with other margins, by task; a task with None is shown only.

        Names of tasks that the suite does not have are ignored.
        """
        tasks = tuple(
            replace(task, margin=margins[task.task], gated=margins[task.task] is not None)
            if task.task in margins
            else task
            for task in self.tasks
        )
        return replace(self, tasks=tasks)


def untrusted_tasks(suite: Suite) -> tuple[str, ...]:
    """Return a sentence for each part of the suite's own definitions that only a trusted author may write."""
    definitions = (definition(suite.own_tasks, task.task) for task in suite.tasks)
    return tuple(reason for document in definitions if document is not None for reason in untrusted(document))


def strangers(suite: Suite) -> Sequence[str]:
    """Return the names of tasks that neither the suite's folder nor lm-eval defines.

    Empty if lm-eval is not installed.
    """
    others = (task.task for task in suite.tasks if definition(suite.own_tasks, task.task) is None)
    return [name for name in others if not _of_lm_eval(name)]


@cache
def _of_lm_eval(name: str) -> bool:
    """Return whether lm-eval defines a task, group or tag of that name; True if lm-eval is not installed.

    Its files are searched, because importing it takes ten seconds.
    """
    lm_eval = find_spec("lm_eval")
    if lm_eval is None or lm_eval.origin is None:
        return True
    mention = re.compile(rf"^\s*(- *)?((task|group|tag): *)?[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
    files = (Path(lm_eval.origin).parent / "tasks").rglob("*.yaml")
    nearest = sorted(files, key=lambda path: name not in str(path))  # where it is by its name is looked at first
    return any(mention.search(path.read_text(encoding="utf-8", errors="replace")) for path in nearest)


def located(data: str) -> tuple[str, str]:
    """Return the repository and the revision, by default "main", in an entry of a task's `data`."""
    repo, _, revision = data.partition("@")
    return repo, revision or "main"


def load(name: str) -> Suite:
    """Return the suite with a name, or the suite in a YAML file by its path; its own tasks lie beside that file.

    Raises `DefinitionError` with the nearest existing name, or with file, line and key of a fault.
    """
    return parse(Path(name).absolute() if records.is_path(name) else records.file_of("suite", name, FOLDER))


def parse(path: Path) -> Suite:
    """Return the suite in a file, checked against the definitions of its own tasks. Raises `DefinitionError`."""
    document = read(path)
    # The file says once what flips; a task may say it for itself.
    if "expected_flip_rate" not in document.data:
        raise document.error("missing key 'expected_flip_rate'")
    flip_rate, tasks = document.data.pop("expected_flip_rate"), document.data.get("tasks")
    for task in tasks if isinstance(tasks, list) else ():
        if isinstance(task, dict):
            task.setdefault("expected_flip_rate", flip_rate)
    field_names = {field.name for kind in (Suite, SuiteTask) for field in fields(kind)} - {"path"}
    suite = replace(document.read(Suite, field_names), path=path)
    if suite.name != path.stem:
        raise document.error(f"'name' must be the file's name, {path.stem!r}", "name")
    task_names: set[str] = set()
    for number, task in enumerate(suite.tasks):
        if task.task in task_names:
            raise document.error(f"task {task.task!r} appears twice", "tasks", number, "task")
        task_names.add(task.task)
        if (task.expected_spread is None) == (task.kind == "perplexity"):
            what = "needs" if task.expected_spread is None else "has no"
            raise document.error(f"metric {task.metric!r} {what} 'expected_spread'", "tasks", number, "metric")
    if not any(task.gated for task in suite.tasks):
        raise document.error("no task is gated, so the suite cannot decide anything", "tasks")
    try:
        prompts.load(suite.canary)
    except DefinitionError as error:
        raise document.error(str(error), "canary") from error
    for number, task in enumerate(suite.tasks):
        if (own := definition(suite.own_tasks, task.task)) is not None:
            _check_own(document, number, task, own)
    return suite


def definition(folder: Path, task: str) -> Document | None:
    """Return the definition of a task in a folder of own tasks; None if the folder has none: then it is lm-eval's.

    Raises `DefinitionError` for a name that leads out of the folder, and for an invalid file.
    """
    path = folder / f"{task}.yaml"
    if path.name != f"{task}.yaml" or path.parent != folder:
        raise DefinitionError(f"{task!r} is no name of a task")
    return read(path) if path.is_file() else None


def data_files(definition: Document) -> dict[str, list[Path]]:
    """Return the data files of a task's definition by split.

    Raises `DefinitionError` for a file that is absent or lies outside the definition's folder.
    """
    data_files: Any = (definition.data.get("dataset_kwargs") or {}).get("data_files") or {}
    place = ("dataset_kwargs", "data_files")
    if not isinstance(data_files, dict):
        raise definition.error("'data_files' must name a file, or a list of them, for each split", *place)
    files: dict[str, list[Path]] = {}
    for split, names in data_files.items():
        files[split] = [definition.path.parent / name for name in ([names] if isinstance(names, str) else names)]
        for path in files[split]:
            if not path.resolve().is_relative_to(definition.path.parent.resolve()) or not path.is_file():
                raise definition.error(f"found no file {path.name} beside it", *place, split)
    return files


def _check_own(suite: Document, number: int, task: SuiteTask, definition: Document) -> None:
    """Raise `DefinitionError` where a suite and the definition of its own task disagree."""
    data = definition.data
    if data.get("task") != task.task:
        raise definition.error(f"'task' must be the file's name, {task.task!r}", "task")
    metrics = [str(entry.get("metric")) for entry in data.get("metric_list") or ()]
    filters = [str(entry.get("name")) for entry in data.get("filter_list") or ()] or ["none"]
    for key, found, known in (("metric", task.metric, metrics), ("filter", task.filter, filters)):
        if known and found not in known:
            where = ("tasks", number, key) if ("tasks", number, key) in suite.lines else ("tasks", number, "task")
            raise suite.error(f"{key} {found!r} is none of {definition.path.name}'s: {', '.join(known)}", *where)
    split = data.get("test_split") or data.get("validation_split")
    files = data_files(definition).get(str(split), [])
    if files and all(path.suffix == ".jsonl" for path in files):
        try:
            there = sum(bool(line.strip()) for path in files for line in path.read_text(encoding="utf-8").split("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise suite.error(f"{files[0]} cannot be read as UTF-8: {error}", "tasks", number, "task") from error
        if there != task.items:
            raise suite.error(f"{task.items} items, {files[0].name} has {there}", "tasks", number, "items")


def untestable(
    suite: Suite, margin: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1
) -> tuple[str, ...]:
    """Return a sentence for each gated task whose margin is smaller than its number of items can test.

    `margin` is the recipe's, as a fraction; a task's own margin goes before it. `looks` is how often the items are
    judged while they are asked, which costs a little power. If every task can be tested, but a lossless checkpoint
    passes all of them less often than `power`, by more than 0.01, one sentence says so. Else the result is empty.
    """
    sentences = []
    chances: dict[str, float] = {}
    for task in suite.tasks:
        task_margin = task.margin or margin
        if not task.gated:
            continue
        smallest = task.detectable(confidence, power, looks)
        chances[task.task] = task.passes(task_margin, confidence, looks)
        if task_margin < smallest:
            needed = task.items_needed(task_margin, confidence, power, looks)
            expected = f"flip rate {task.expected_flip_rate:.1%}"
            if task.expected_spread is not None:
                expected = f"spread between documents {task.expected_spread:.1%}"
            sentences.append(
                f"{task.task}: {task.items} items can test a margin of {smallest:.2%} or wider, not {task_margin:.2%}, "
                f"which needs {needed} items ({expected}, confidence {confidence:.0%}, power {power:.0%})"
            )
    together = math.prod(chances.values())
    if not sentences and len(chances) > 1 and together < power - 0.01:
        chances_by_name = ", ".join(f"{name} {chance:.0%}" for name, chance in chances.items())
        sentences.append(
            f"a lossless checkpoint passes all {len(chances)} tasks that decide with a chance of {together:.0%} "
            f"({chances_by_name}), expected {power:.0%}: {_remedy(suite, chances, confidence, power, looks)}"
        )
    return tuple(sentences)


def _remedy(suite: Suite, chances: Mapping[str, float], confidence: float, power: float, looks: int) -> str:
    """Return what makes a recipe promise what it can: a margin of the least likely task, a lower power, one less."""
    together, name = math.prod(chances.values()), min(chances, key=lambda task: chances[task])
    needed = power * chances[name] / together
    wider = "widen margins"
    if needed < _MOST_POWER:
        task = next(task for task in suite.tasks if task.task == name)
        margin = math.ceil(1e4 * task.detectable(confidence, needed, looks)) / 1e4
        wider = f"widen margins ({name} to {margin:.2%} is enough)"
    lower = math.floor(100 * together) / 100
    less = f", promise less (gate.accuracy.power: {lower:g})" if lower >= _LEAST_POWER else ""
    return f"{wider}{less}, or let a task be shown only (a margin of null)"


_LEAST_POWER, _MOST_POWER = 0.5, 0.999
"""The least power that a recipe can promise, and the highest for which a margin is worth naming."""
