"""Scores as the Hub reads them: one file of `.eval_results` for each task that is a benchmark there."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from eval.accuracy import Accuracy
from eval.gate import GateReport
from eval.report.numbers import signed, unit_of
from pipeline.publish.card.facts import CardFacts

FOLDER = ".eval_results"


def eval_results(facts: CardFacts) -> dict[str, str]:
    """The files by their names in the release; none for tasks that are no benchmark of the Hub."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    gate = GateReport.from_json(facts.report["gate"])
    found: dict[str, str] = {}
    for result in gate.accuracy:
        row = _table().get(result.task)
        if row is None or row["metric"] != result.metric:
            continue
        entry = EvalResultEntry(
            dataset_id=row["dataset"],
            task_id=row["task_id"],
            value=round(100 * result.candidate, 2),
            date=facts.judged,
            source_url=None if facts.repo is None else f"https://huggingface.co/{facts.repo}/tree/main/quantmint",
            source_name=None if facts.repo is None else "quantmint's record of the evaluation",
            notes=_notes(result, row["items"], facts),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=120)
        found[f"{FOLDER}/{result.task}.yaml"] = text
    return found


def _notes(result: Accuracy, whole: int, facts: CardFacts) -> str:
    """How many items, beside which baseline, with which uncertainty, on what."""
    unit = unit_of(result.kind)
    low, high = unit.span(result.interval_low, result.interval_high)
    asked = f"{result.items:,} items" if result.items == whole else f"{result.items:,} of {whole:,} items"
    harness = f"lm-eval {facts.report['versions'].get('lm-eval', '')}".strip()
    return (
        f"{harness}, {asked}; 16-bit baseline {100 * result.baseline:.2f} on the same items, change"
        f" {unit.words(result.difference)} with a {result.confidence:.0%} interval of {signed(low)} to"
        f" {signed(high)}"
    ).replace("\N{NO-BREAK SPACE}", " ")


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("pipeline.publish.card").joinpath("benchmarks.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return rows
