"""Scores per item, as lm-eval logs them, joined between two models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eval.errors import MeasurementError

# 64 bits of each SHA-256 are kept: enough to tell two documents apart, a quarter of the bytes to publish.
HASH_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored item.

    `task` is the leaf task (a group such as mmlu has many), `doc_id` the item's number in it. The three hashes are
    the first 16 hexadecimal digits of lm-eval's SHA-256 of the document, the prompt and the target.
    """

    task: str
    doc_id: int
    filter: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    score: float

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies the item in both runs."""
        return (self.task, self.doc_id, self.filter)


@dataclass(frozen=True, slots=True)
class SampleSet:
    """All samples of one task (or group) of a suite, by one metric, from one model."""

    task: str
    metric: str
    samples: tuple[Sample, ...]

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain lists, one per field of `Sample`: compact, and readable by any language."""
        columns = {field.name: [getattr(s, field.name) for s in self.samples] for field in fields(Sample)}
        return {"task": self.task, "metric": self.metric, "samples": columns}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SampleSet:
        """Read back what `to_json` wrote; `MeasurementError` where columns are missing or of unequal length."""
        try:
            columns = [data["samples"][field.name] for field in fields(Sample)]
            rows = tuple(Sample(*row) for row in zip(*columns, strict=True))
            return cls(str(data["task"]), str(data["metric"]), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"not a sample set: {error}") from error


def read_log(path: Path, task: str, metric: str, filter_name: str) -> tuple[Sample, ...]:
    """Read one `samples_*.jsonl` of lm-eval, keeping the rows of one filter.

    Raises `MeasurementError` where the file is broken, lacks the metric, or has a score that is not a finite number.
    """
    found: list[Sample] = []
    filters: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            filters.add(row["filter"])
            if row["filter"] != filter_name:
                continue
            document, prompt, target = (row[f"{name}_hash"][:HASH_DIGITS] for name in ("doc", "prompt", "target"))
            if metric not in row:
                raise MeasurementError(f"{path}:{number}: no metric {metric!r}; the row has {row['metrics']}")
            score = float(row[metric])
            if not math.isfinite(score):
                raise MeasurementError(f"{path}:{number}: {metric} is {score}")
            found.append(Sample(task, int(row["doc_id"]), filter_name, document, prompt, target, score))
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"{path}:{number}: not a sample of lm-eval: {error!r}") from error
    if not found:
        raise MeasurementError(f"{path}: no sample with filter {filter_name!r}; the file has {sorted(filters)}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The scores of both models on the same items, in the same order."""

    task: str
    metric: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]


def pair(baseline: SampleSet, candidate: SampleSet) -> Pairs:
    """Join two runs on (task, doc_id, filter).

    Raises `MeasurementError` when an item is missing or repeated on a side, or when its document, prompt or target
    differs: scores on different questions cannot be compared.
    """
    if (baseline.task, baseline.metric) != (candidate.task, candidate.metric):
        raise MeasurementError(
            f"{baseline.task} by {baseline.metric} cannot be paired with {candidate.task} by {candidate.metric}"
        )
    left = _by_key(baseline, "baseline")
    right = _by_key(candidate, "candidate")
    for missing, side in ((left.keys() - right.keys(), "candidate"), (right.keys() - left.keys(), "baseline")):
        if missing:
            raise MeasurementError(
                f"{baseline.task}: {len(missing)} of {len(left.keys() | right.keys())} items are missing "
                f"from the {side}, first {_names(missing)}"
            )
    for what in ("doc_hash", "prompt_hash", "target_hash"):
        other = [key for key in left if getattr(left[key], what) != getattr(right[key], what)]
        if other:
            noun = {"doc_hash": "document", "prompt_hash": "prompt", "target_hash": "target"}[what]
            raise MeasurementError(
                f"{baseline.task}: the {noun} differs in {len(other)} of {len(left)} items, first {_names(other)}; "
                "both sides must see the same questions in the same template"
            )
    if not left:
        raise MeasurementError(f"{baseline.task}: no items")
    keys = sorted(left)
    return Pairs(
        baseline.task,
        baseline.metric,
        tuple(left[key].score for key in keys),
        tuple(right[key].score for key in keys),
    )


def _by_key(samples: SampleSet, side: str) -> dict[tuple[str, int, str], Sample]:
    found = {sample.key: sample for sample in samples.samples}
    repeated = len(samples.samples) - len(found)
    if repeated:
        raise MeasurementError(f"{samples.task}: {repeated} items appear more than once in the {side}")
    return found


def _names(keys: Iterable[tuple[str, int, str]]) -> str:
    return ", ".join(f"{task}#{doc_id}" for task, doc_id, _ in sorted(keys)[:3])
