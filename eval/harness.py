"""Messages to the process that runs lm-eval (`eval.harness_child`), and the record of an item that it answered.

    >>> [len(look) for look in draw({"facts": [""] * 1000}, looks=4, seed=0)]
    [250, 250, 250, 250]

The order of a task's items is that of a SHA-256 of the seed and the item, so it is the same on every machine and on
both sides, and a look is a random sample of the task. A limit takes the first items of that order: never the first of
the file, where a subject or a difficulty may come first.

lm-eval's log of a sample holds the document, every request and every response, some kilobytes each. Kept are the
score with the hashes that make it comparable (`Sample`), and the answer that a person would look at.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import yaml

from quantmint.eval.errors import DefinitionError, MeasurementError
from quantmint.eval.foreign import untrusted
from quantmint.eval.samples import Sample
from quantmint.eval.statistics.sequential import plan_looks
from quantmint.eval.suites import SuiteTask, data_files, definition


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of completions, and the settings of the requests to it.

    `path` is where prompts are sent, and `runtime` names the form of the requests ("vllm": OpenAI's, with prompts that
    are echoed). `base_url` is without both; `max_length` is the server's maximum length in tokens, `seed` that of the
    few-shot examples and of the requests. Prompts go out as token ids, so the server's tokenizer has no say.
    `batch_size` prompts share one HTTP request: parsing and scheduling a list is far cheaper than as many requests,
    above all for the four one-line requests that a multiple-choice item makes. `concurrency` such requests are in
    flight at a time.
    """

    base_url: str
    model_name: str
    tokenizer: Path
    max_length: int
    seed: int
    concurrency: int = 8
    batch_size: int = 32
    runtime: str = "vllm"
    path: str = "/v1/completions"

    def model_arguments(self) -> dict[str, object]:
        """Return the constructor arguments of lm-eval's model `local-completions` for this server."""
        return {
            "model": self.model_name,
            "base_url": f"{self.base_url.rstrip('/')}{self.path}",
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
    """Return the first message: the server, the seed, and the folder `include_path` with our task definitions.

    With `only_ours` lm-eval does not read the index of its own tasks.
    """
    given = {"model": endpoint.model_arguments(), "seed": endpoint.seed, "runtime": endpoint.runtime}
    return {"open": {**given, "include_path": str(include_path), "only_ours": only_ours}}


def loading(task: SuiteTask, commits: Mapping[str, str]) -> dict[str, Any]:
    """Return the message that loads a task.

    The child replies ``{"documents": {leaf task: [cluster of each]}, "datasets": [...]}``. ``commits`` maps data sets
    of the Hub to the commits at which they are read; other data sets are read at their main branch.
    """
    return {"load": {"task": asdict(task), "commits": dict(commits)}}


def asking(task: SuiteTask, documents: Mapping[str, Sequence[int]], destination: Path) -> dict[str, Any]:
    """Return the message that asks documents of a loaded task and writes the answers to a file (see `read_asked`).

    ``documents`` maps a leaf task to numbers of its documents. The child replies ``{"items": n, "full": n}``: the
    number of scored items, and of prompts that may have been cut to fit the server.
    """
    return {"ask": {"task": task.task, "documents": documents, "destination": str(destination)}}


def materialise_tasks(
    tasks_dir: Path, names: Iterable[str], destination: Path, *, trusted: bool = False
) -> tuple[str, ...]:
    """Write the definitions of our own tasks to a folder that lm-eval reads, whatever its working directory.

    `datasets` resolves `data_files` against the working directory, so their paths become absolute. Names without a file
    in `tasks_dir` are lm-eval's own tasks and are left out. Returns the names that were written. Raises
    `DefinitionError` for a definition that does more than name data, unless its author is `trusted`, and for one that
    is invalid.
    """
    destination.mkdir(parents=True, exist_ok=True)
    ours = {name: own for name in names if (own := definition(tasks_dir, name)) is not None}
    for own in () if trusted else ours.values():
        if reasons := untrusted(own):
            raise DefinitionError(f"{own.path}: {'; '.join(reasons)}, which may run code")
    for name, own in ours.items():
        task = own.data
        if files := data_files(own):
            where = {split: [str(path.resolve()) for path in paths] for split, paths in files.items()}
            task["dataset_kwargs"]["data_files"] = where
        text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
        (destination / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tuple(ours)


Item = tuple[str, int]
"""Leaf task and number of the document in it."""


def draw(
    documents: Mapping[str, Sequence[str]], *, looks: int, seed: int, limit: int | None = None
) -> tuple[tuple[Item, ...], ...]:
    """Return the items of each look, in an order that follows from `seed` alone.

    `documents` maps a leaf task to the cluster of each of its documents ("": none). Items that share a cluster stay in
    one look, whose end moves on to include them: only so are two looks independent. There are fewer looks if a look
    would be small (`plan_looks`) or a cluster spans one. `limit` takes the first items of the order (None: all). Raises
    `ValueError` without documents.
    """
    cluster = {(leaf, number): name for leaf, names in documents.items() for number, name in enumerate(names)}
    order = sorted(cluster, key=lambda item: (_place(seed, item, cluster[item]), item))[:limit]
    batches: list[tuple[Item, ...]] = []
    start = 0
    for end in plan_looks(len(order), looks):
        while 0 < end < len(order) and cluster[order[end]] and cluster[order[end]] == cluster[order[end - 1]]:
            end += 1
        if end > start:
            batches.append(tuple(sorted(order[start:end])))
            start = end
    return tuple(batches)


def by_leaf(items: Sequence[Item]) -> dict[str, list[int]]:
    """Return the ascending document numbers by leaf task, as lm-eval expects them."""
    documents: dict[str, list[int]] = {}
    for leaf, number in sorted(items):
        documents.setdefault(leaf, []).append(number)
    return documents


def some(items: Sequence[Item], count: int, seed: int) -> tuple[Item, ...]:
    """Return at most `count` of the items, sorted; the draw depends on `seed` and not on the order of `items`."""
    return tuple(sorted(sorted(items, key=lambda item: (_place(seed, item, ""), item))[:count]))


def _place(seed: int, item: Item, cluster: str) -> bytes:
    name = f"passage {cluster}" if cluster else f"item {item[1]} of {item[0]}"
    return hashlib.sha256(f"{seed}: {name}".encode()).digest()


# 64 bits of each SHA-256 are kept: enough to tell two documents apart, a quarter of the bytes to publish.
HASH_DIGITS = 16
# The end of a prompt has the question; what comes before are examples.
PROMPT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of a batch of items: the settings they were asked with, scores, and answers.

    `answers` is empty for a perplexity task. Samples and answers name their item by leaf task and document number.
    """

    settings: Mapping[str, Any]
    samples: tuple[Sample, ...]
    answers: tuple[Mapping[str, Any], ...]

    def on(self, items: Collection[Item]) -> Asked:
        """Return the batch restricted to these items."""
        samples = tuple(sample for sample in self.samples if (sample.task, sample.doc_id) in items)
        answers = tuple(answer for answer in self.answers if (answer["task"], answer["doc_id"]) in items)
        return Asked(self.settings, samples, answers)


def joined(batches: Sequence[Asked]) -> Asked:
    """Return several batches as one, with samples and answers sorted by leaf task and document number.

    Raises `MeasurementError` if the batches were asked with different settings.
    """
    settings = common_settings(batches, "items")
    samples = sorted((sample for batch in batches for sample in batch.samples), key=lambda s: (s.task, s.doc_id))
    answers = sorted((shown for batch in batches for shown in batch.answers), key=lambda a: (a["task"], a["doc_id"]))
    return Asked(settings, tuple(samples), tuple(answers))


def common_settings(batches: Sequence[Asked], what: str) -> Mapping[str, Any]:
    """Return the settings that all batches, at least one, were asked with.

    Raises `MeasurementError` if they differ; `what` names the batches in its message.
    """
    first, *rest = batches
    for batch in rest:
        if batch.settings != first.settings:
            raise MeasurementError(f"{what} were asked as {dict(first.settings)}, {dict(batch.settings)}")
    return first.settings


def items_digest(items: Iterable[Item]) -> str:
    """Return the SHA-256 of a set of items, which names their batch."""
    return hashlib.sha256(json.dumps(sorted(items)).encode()).hexdigest()


def digest(value: object) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a value's JSON, with sorted keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def read_rows(
    rows: Iterable[Mapping[str, Any]], leaf: str, task: SuiteTask, clusters: Sequence[str]
) -> tuple[Sample, ...]:
    """Return the samples in lm-eval's rows of a leaf task, those of the task's filter.

    `clusters` has one value per document of the leaf task. Raises `MeasurementError` if no row has the filter, if a row
    lacks the metric or is otherwise malformed, or if a score is not a finite number.
    """
    samples: list[Sample] = []
    filters: set[str] = set()
    for row in rows:
        try:
            filters.add(row["filter"])
            if row["filter"] == task.filter:
                samples.append(_sample(row, leaf, task, clusters))
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"{leaf}#{row.get('doc_id')}: not a sample of lm-eval: {error!r}") from error
    if not samples:
        raise MeasurementError(f"{leaf}: no sample with filter {task.filter!r}; there are {sorted(filters)}")
    return tuple(samples)


def _sample(row: Mapping[str, Any], leaf: str, task: SuiteTask, clusters: Sequence[str]) -> Sample:
    number = int(row["doc_id"])
    document, prompt, target = (row[f"{name}_hash"][:HASH_DIGITS] for name in ("doc", "prompt", "target"))
    if task.metric not in row:
        raise MeasurementError(f"{leaf}#{number}: no metric {task.metric!r}; the row has {row['metrics']}")
    value, weight = (row[task.metric], 1.0) if task.kind == "score" else row[task.metric]
    score = float(value)
    if not math.isfinite(score):
        raise MeasurementError(f"{leaf}#{number}: {task.metric} is {score}")
    if not weight > 0:
        raise MeasurementError(f"{leaf}#{number}: a document of {weight} words")
    return Sample(leaf, number, task.filter, document, prompt, target, score, float(weight), clusters[number])


def answer(row: Mapping[str, Any], leaf: str, task: SuiteTask, choices: Sequence[str] | None) -> dict[str, Any]:
    """Return the record of one answer from lm-eval's row: the end of the prompt, the expected and the actual answer.

    `choices` are the texts of a multiple-choice item (None: no choices); its answer is the likeliest by the task's
    metric, and all log likelihoods (nats) are kept. For generated text `extracted` is the part that the filter took.
    Raises `MeasurementError` if a choice's log likelihood is not finite.
    """
    prompt, *_ = row["arguments"][0]
    shown: dict[str, Any] = {
        "task": leaf,
        "doc_id": int(row["doc_id"]),
        "filter": row["filter"],
        "prompt": str(prompt)[-PROMPT_CHARACTERS:],
        "target": _target(row["target"], choices),
    }
    if choices is None:
        response = row["resps"][0][0]
        if not isinstance(response, str):  # the log likelihood of one text, and whether greedy decoding says it
            return {**shown, "response": shown["target"] if response[1] else "", "loglikelihoods": [response[0]]}
        extracted = row["filtered_resps"][0]
        return {**shown, "response": response, "extracted": extracted if isinstance(extracted, str) else response}
    likelihoods = [float(response[0]) for response in row["filtered_resps"][: len(choices)]]
    for likelihood in likelihoods:
        if not math.isfinite(likelihood):
            raise MeasurementError(f"{leaf}#{row['doc_id']}: a log likelihood is {likelihood}")
    weights = {"acc_norm": [len(c) for c in choices], "acc_bytes": [len(c.encode()) for c in choices]}
    lengths = weights.get(task.metric, [1] * len(choices))
    chosen = max(range(len(choices)), key=lambda n: likelihoods[n] / max(lengths[n], 1))
    return {
        **shown,
        "response": choices[chosen],
        "choices": list(choices),
        "loglikelihoods": [round(likelihood, 4) for likelihood in likelihoods],
    }


def _target(target: object, choices: Sequence[str] | None) -> str:
    if isinstance(target, list):
        return " | ".join(_target(one, choices) for one in target)
    if choices is not None and isinstance(target, int) and 0 <= target < len(choices):
        return choices[target]
    return str(target)


def write_asked(path: Path, asked: Asked) -> None:
    """Write a batch as compressed JSON lines, under a temporary name first, so that no reader sees half of it."""
    lines = [{"settings": dict(asked.settings)}, *({"sample": astuple(sample)} for sample in asked.samples)]
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(compressed([*lines, *({"answer": shown} for shown in asked.answers)]))
    partial.replace(path)


def read_asked(path: Path) -> Asked:
    """Read back what `write_asked` wrote. Raises `MeasurementError` for anything else."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            head, *lines = map(json.loads, stream)
        samples = tuple(Sample(*line["sample"]) for line in lines if "sample" in line)
        return Asked(head["settings"], samples, tuple(line["answer"] for line in lines if "answer" in line))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise MeasurementError(f"{path}: not a batch of answers: {error}") from error


def compressed(lines: Iterable[object]) -> bytes:
    """Return JSON lines as gzip data; equal lines give equal bytes, because neither a name nor a time is stored."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream:
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return buffer.getvalue()
