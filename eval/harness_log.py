"""What lm-eval logs of an item, as a score and as an answer to show.

lm-eval's log of a sample holds the document, every request and every response, some kilobytes each. Kept are the
score with the hashes that make it comparable (`Sample`), and the answer that a person would look at.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from eval.errors import MeasurementError
from eval.samples import Sample
from eval.suites import SuiteTask

# 64 bits of each SHA-256 are kept: enough to tell two documents apart, a quarter of the bytes to publish.
HASH_DIGITS = 16
# The end of a prompt has the question; what comes before are examples.
PROMPT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Asked:
    """What one batch of items gave: how they were asked, their scores, and answers unless it is a perplexity task."""

    settings: Mapping[str, Any]
    samples: tuple[Sample, ...]
    answers: tuple[Mapping[str, Any], ...]


def digest(value: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a value's JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def read_rows(
    rows: Iterable[Mapping[str, Any]], leaf: str, task: SuiteTask, clusters: Sequence[str]
) -> tuple[Sample, ...]:
    """The samples of one filter among lm-eval's rows of a leaf task; `clusters` has one value a document.

    Raises `MeasurementError` where a row lacks the metric, or a score or log likelihood is not a finite number.
    """
    found: list[Sample] = []
    filters: set[str] = set()
    for row in rows:
        try:
            filters.add(row["filter"])
            if row["filter"] == task.filter:
                found.append(_sample(row, leaf, task, clusters))
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"{leaf}#{row.get('doc_id')}: not a sample of lm-eval: {error!r}") from error
    if not found:
        raise MeasurementError(f"{leaf}: no sample with filter {task.filter!r}; there are {sorted(filters)}")
    return tuple(found)


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
    """The answer of a row of the task's filter: what was asked, what was expected, what came back.

    `choices` are the texts of a multiple-choice item, whose answer is the likeliest by the task's metric; all log
    likelihoods (nats) are kept. Of generated text `extracted` is what the filter took from it.
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
    """Write a batch by a temporary name, so that a reader never meets half of it."""
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
    """JSON Lines, compressed to the same bytes every time: no name, no time."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream:
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return buffer.getvalue()
