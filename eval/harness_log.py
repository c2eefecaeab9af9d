"""Scores per item, as lm-eval logs them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from eval.errors import MeasurementError
from eval.samples import Sample

# 64 bits of each SHA-256 are kept: enough to tell two documents apart, a quarter of the bytes to publish.
HASH_DIGITS = 16


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
