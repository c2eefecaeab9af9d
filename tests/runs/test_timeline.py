"""What answers are expected to take before anybody has answered."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.eval import suites
from quantmint.pipeline.runs.timeline import _seconds_before
from quantmint.pipeline.stages.estimate import item_seconds
from quantmint.pipeline.stages.evaluate import EvaluateStage
from quantmint.pipeline.stages.stage import Planned

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
    return item_seconds(suite.tasks[0], suite, 1.0, 1000.0)


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 200.0), ({"t": 100}, 200.0), ({"t": 50}, 400.0), ({"t": 49}, None), ({}, None)]
)
def test_an_evaluation_whose_answers_were_known_tells_nothing_of_the_next(
    asked: dict[str, int] | None, seconds: float | None
) -> None:
    """It took 100 s for 100 of 100 items of which so many were asked; 200 are planned now."""
    result = {"items": {"t": [100, 100]}, **({} if asked is None else {"asked": asked})}
    entry = SimpleNamespace(record=SimpleNamespace(result=result))
    suite = SimpleNamespace(tasks=(SimpleNamespace(task="t", items=200),))
    recipe = SimpleNamespace(evaluation=SimpleNamespace(limit=None))
    setting: Any = SimpleNamespace(store=SimpleNamespace(find=lambda *_: entry), suite=suite, recipe=recipe)
    stage = EvaluateStage("baseline")
    planned = Planned(stage, {}, {}, "f")
    assert _seconds_before(planned, setting, {stage.key: ("f", 100.0)}) == seconds


def test_an_answer_ends_where_its_task_says(tmp_path: Path) -> None:
    question = {"question": "What is it? " * 2, "answer": "1234"}
    assert seconds(tmp_path, "exact_match", question) == pytest.approx(7 + 4 * 1000, abs=0.1)
    assert seconds(tmp_path, "exact_match", question, most=32) == pytest.approx(7 + 32 * 1000, abs=0.1)


def test_a_prompt_holds_no_keys_and_one_choice(tmp_path: Path) -> None:
    facts = {"question": "x" * 40, "choices": ["abc", "defg"], "answer": "0000"}
    one_choice = (40 + len(str(facts["choices"])) / 2 + 4) / 4
    assert seconds(tmp_path, "acc", facts) == pytest.approx(4 * one_choice, abs=0.1)
