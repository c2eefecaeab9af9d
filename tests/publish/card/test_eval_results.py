"""Scores beside the card: read back by the Hub's own parser, and only of tasks that are benchmarks there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from quantmint.pipeline.publish.card import CardFacts, eval_results
from tests.publish.card import samples


def entries(facts: CardFacts) -> dict[str, Any]:
    from huggingface_hub import parse_eval_result_entries

    return {name: parse_eval_result_entries(yaml.safe_load(text))[0] for name, text in eval_results(facts).items()}


def with_accuracy(**changes: Any) -> CardFacts:
    facts = samples.llama()
    gate = facts.report["gate"]
    first, *others = gate["accuracy"]
    report: Any = {**facts.report, "gate": {**gate, "accuracy": [{**first, **changes}, *others]}}
    return replace(facts, report=report)


def test_a_benchmark_of_the_hub_has_its_file() -> None:
    found = entries(samples.llama())
    assert list(found) == [".eval_results/gsm8k.yaml"]  # neither mmlu nor ifeval nor wikitext is one
    entry = found[".eval_results/gsm8k.yaml"]
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 81.52)
    assert entry.date == "2026-11-21T11:59:58.120Z"
    assert entry.source_url == "https://huggingface.co/my-org/Llama-3.3-70B-FP8-KV/tree/main/quantmint"
    assert entry.notes.startswith("lm-eval 0.4.13, 660 of 1,319 items; 16-bit baseline 81.67 on the same items")
    assert "95% interval of" in entry.notes


def test_a_score_by_another_metric_is_another_score() -> None:
    assert entries(with_accuracy(metric="exact_match_flexible")) == {}


def test_no_address_for_what_is_not_on_the_hub() -> None:
    assert entries(samples.llama(repo=None))[".eval_results/gsm8k.yaml"].source_url is None
