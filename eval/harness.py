"""What the process that runs lm-eval is told (`eval.harness_child`): how the server is asked, and which items.

    >>> [len(look) for look in draw({"facts": [""] * 1000}, looks=4, seed=0)]
    [250, 250, 250, 250]

The order of a task's items is that of a SHA-256 of the seed and the item, so it is the same on every machine and on
both sides, and a look is a random sample of the task. A limit takes the first items of that order: never the first of
the file, where a subject or a difficulty may come first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.errors import DefinitionError
from eval.statistics.sequential import plan_looks
from eval.suites import SuiteTask


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of completions, and how it is asked.

    `base_url` is without `/v1`; `max_length` is the server's maximum length in tokens, `seed` that of the few-shot
    examples and of the requests. Prompts go out as token ids, so the server's tokenizer has no say. `batch_size`
    prompts share one HTTP request: parsing and scheduling a list is far cheaper than as many requests, above all for
    the four one-line requests that a multiple-choice item makes. `concurrency` such requests are in flight.
    """

    base_url: str
    model_name: str
    tokenizer: Path
    max_length: int
    seed: int
    concurrency: int = 8
    batch_size: int = 32

    def model_arguments(self) -> dict[str, object]:
        """Arguments of lm-eval's model `local-completions`."""
        return {
            "model": self.model_name,
            "base_url": f"{self.base_url.rstrip('/')}/v1/completions",
            "tokenizer": str(self.tokenizer),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": self.concurrency,
            "batch_size": self.batch_size,
            "max_retries": 3,
            "max_length": self.max_length,
            "seed": self.seed,
            "timeout": 3600,
        }


def opening(endpoint: Endpoint, include_path: Path, *, only_ours: bool) -> dict[str, Any]:
    """The first message: whom to ask, and where tasks of ours lie beside lm-eval's own.

    With `only_ours` the latter are not even looked for, which takes lm-eval some seconds.
    """
    return {
        "open": {
            "model": endpoint.model_arguments(),
            "seed": endpoint.seed,
            "include_path": str(include_path),
            "only_ours": only_ours,
        }
    }


def loading(task: SuiteTask, commits: Mapping[str, str]) -> dict[str, Any]:
    """Load a task; the answer is ``{"documents": {leaf task: [cluster of each]}, "datasets": [...]}``.

    ``commits`` are those at which data sets of the Hub are to be read; of others their main branch is.
    """
    return {"load": {"task": asdict(task), "commits": dict(commits)}}


def asking(task: SuiteTask, documents: Mapping[str, Sequence[int]], destination: Path) -> dict[str, Any]:
    """Ask documents of a task that was loaded, by leaf task; the answers go into a file (`harness_log.read_asked`).

    The answer counts them: ``{"items": n, "full": n}``, the latter prompts that may have been cut to fit the server.
    """
    return {"ask": {"task": task.task, "documents": documents, "destination": str(destination)}}


def materialise_tasks(tasks_dir: Path, names: Iterable[str], destination: Path) -> tuple[str, ...]:
    """Copy our own task files to where lm-eval finds them from any working directory.

    `datasets` resolves `data_files` against the working directory, so they become absolute. Names without a file in
    `tasks_dir` belong to lm-eval itself. Returns the names that were written; `DefinitionError` for a broken file.
    """
    destination.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        source = tasks_dir / f"{name}.yaml"
        if not source.is_file():
            continue
        try:
            task: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
            files = task["dataset_kwargs"]["data_files"]
            if task["task"] != name:
                raise DefinitionError(f"{source}: 'task' must be the file's name, {name!r}, found {task['task']!r}")
            task["dataset_kwargs"]["data_files"] = _absolute(source, files)
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise DefinitionError(f"{source}: not a local lm-eval task with data_files: {error}") from error
        text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
        (destination / source.name).write_text(text, encoding="utf-8")
        written.append(name)
    return tuple(written)


def _absolute(source: Path, files: Any) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(source, name) for split, name in files.items()}
    if isinstance(files, list):
        return [_absolute(source, name) for name in files]
    path = (source.parent / str(files)).resolve()
    if not path.is_file():
        raise DefinitionError(f"{source}: data file {path} does not exist")
    return str(path)


Item = tuple[str, int]
"""Leaf task and number of the document in it."""


def draw(
    documents: Mapping[str, Sequence[str]], *, looks: int, seed: int, limit: int | None = None
) -> tuple[tuple[Item, ...], ...]:
    """The items of each look; `documents` has the cluster of each document ("": none) by leaf task.

    Items that share a cluster stand together and are never parted by a look, whose ends move back for them: what two
    looks have learnt is independent only so. There are fewer looks where a look would be small (`plan_looks`) or a
    cluster spans one. At most `limit` items are drawn. `ValueError` without documents.
    """
    cluster = {(leaf, number): name for leaf, names in documents.items() for number, name in enumerate(names)}
    order = sorted(cluster, key=lambda item: (_place(seed, item, cluster[item]), item))[:limit]
    found: list[tuple[Item, ...]] = []
    start = 0
    for end in plan_looks(len(order), looks):
        while 0 < end < len(order) and cluster[order[end]] and cluster[order[end]] == cluster[order[end - 1]]:
            end += 1
        if end > start:
            found.append(tuple(sorted(order[start:end])))
            start = end
    return tuple(found)


def by_leaf(items: Sequence[Item]) -> dict[str, list[int]]:
    """Ascending numbers of documents by leaf task, as lm-eval wants them."""
    found: dict[str, list[int]] = {}
    for leaf, number in sorted(items):
        found.setdefault(leaf, []).append(number)
    return found


def some(items: Sequence[Item], count: int, seed: int) -> tuple[Item, ...]:
    """At most `count` of the items, drawn by the seed; the same whatever order they come in."""
    return tuple(sorted(sorted(items, key=lambda item: (_place(seed, item, ""), item))[:count]))


def _place(seed: int, item: Item, cluster: str) -> bytes:
    name = f"passage {cluster}" if cluster else f"item {item[1]} of {item[0]}"
    return hashlib.sha256(f"{seed}: {name}".encode()).digest()
