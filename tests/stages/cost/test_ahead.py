"""What answers are expected to take before anybody has answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.eval import suites
from quantmint.pipeline.stages.ahead import _item_s

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: {kind}
generation_kwargs: {{max_gen_toks: {most}}}
metric_list: [{{metric: {metric}}}]
"""


def seconds(folder: Path, metric: str, row: dict[str, object], most: int = 4) -> float:
    """Of an item of a suite with one, where a token of a prompt takes 1 s and one of an answer 1,000 s."""
    (folder / "own.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "own.yaml").write_text(TASK.format(name="own", kind="generate_until", metric=metric, most=most))
    (folder / "s.yaml").write_text(
        f"name: s\ndescription: One.\nexpected_flip_rate: 0.02\ntasks:\n  - {{task: own, metric: {metric}, items: 1}}\n"
    )
    suite = suites.load(str(folder / "s.yaml"))
    return _item_s(suite.tasks[0], suite, 1.0, 1000.0)


def test_an_answer_ends_where_its_task_says(tmp_path: Path) -> None:
    question = {"question": "What is it? " * 2, "answer": "1234"}
    assert seconds(tmp_path, "exact_match", question) == pytest.approx(7 + 4 * 1000, abs=0.1)
    assert seconds(tmp_path, "exact_match", question, most=32) == pytest.approx(7 + 32 * 1000, abs=0.1)


def test_a_prompt_holds_no_keys_and_one_choice(tmp_path: Path) -> None:
    facts = {"question": "x" * 40, "choices": ["abc", "defg"], "answer": "0000"}
    one_choice = (40 + len(str(facts["choices"])) / 2 + 4) / 4
    assert seconds(tmp_path, "acc", facts) == pytest.approx(4 * one_choice, abs=0.1)
