"""Suites and workloads: what is shipped is testable, what is misspelt is refused where it stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval import harness, records, suites, workloads
from quantmint.eval.errors import DefinitionError

SUITE = """\
name: small
description: One task.
expected_flip_rate: 0.03
tasks:
  - task: facts
    metric: acc
    items: 2000
"""
WORKLOAD = """\
name: small
description: One cell.
profile: latency
cells:
  - name: a
    input_len: 64
    output_len: 32
    concurrency: 4
    num_prompts: 32
    warmups: 4
"""


@pytest.mark.parametrize("name", records.names(suites.FOLDER))
def test_shipped_suites_can_test_a_margin_of_one_point(name: str) -> None:
    assert suites.untestable(suites.load(name), margin=0.01) == ()


@pytest.mark.slow
def test_shipped_suites_name_tasks_metrics_and_filters_of_lm_eval() -> None:
    """Read from the installed lm-eval's own definitions: no data set is fetched."""
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index

    def leaves(name: str) -> list[Mapping[str, Any]]:
        entry = index[name]
        if entry.kind.name == "TASK":
            return [entry.cfg]
        tagged = [other for other, found in index.items() if name in found.tags and found.kind.name == "TASK"]
        return [leaf for child in (tagged or entry.cfg["task"]) for leaf in leaves(child)]

    shipped = [suites.load(name) for name in records.names(suites.FOLDER) if not name.startswith("tiny")]
    counts = {}
    for task in (task for suite in shipped for task in suite.tasks):
        found = leaves(task.task)
        counts[task.task] = len(found)
        # A release must know when what it was judged by has moved.
        assert {leaf["dataset_path"] for leaf in found} == {suites.located(name)[0] for name in task.data}
        for leaf in found:
            assert task.metric in [metric["metric"] for metric in leaf["metric_list"]]
            filters = [filter_["name"] for filter_ in leaf.get("filter_list", [{"name": "none"}])]
            assert task.filter in filters, (task.task, filters)
            assert (leaf["output_type"] == "loglikelihood_rolling") == (task.kind == "perplexity")
            generates = leaf["output_type"] == "generate_until"
            assert generates or task.max_gen_tokens is None
            # What a task says itself about the length of an answer is not cut short.
            assert (task.max_gen_tokens or 10**9) >= leaf.get("generation_kwargs", {}).get("max_gen_toks", 0)
            # lm-eval ignores another number where a task insists on none.
            assert leaf.get("num_fewshot") != 0 or not task.num_fewshot
    assert counts == {
        "mmlu": 57, "gsm8k": 1, "ifeval": 1, "wikitext": 1,
        "mmlu_pro": 14, "gpqa_diamond_cot_zeroshot": 1, "aime24": 1, "aime25": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", records.names(workloads.FOLDER))
def test_shipped_workloads_fill_their_concurrency(name: str) -> None:
    workload = workloads.load(name)
    assert all(cell.num_prompts >= 2 * cell.in_flight or cell.concurrency is None for cell in workload.cells)
    assert name != "tiny" or workload.longest <= 512


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def test_suite_defaults(tmp_path: Path) -> None:
    task = suites.parse(write(tmp_path, SUITE)).tasks[0]
    assert task == suites.SuiteTask("facts", "acc", 2000, 0.03)
    assert task.kind == "score"


def test_where_a_task_s_data_lies(tmp_path: Path) -> None:
    text = SUITE.replace("items: 2000", "items: 2000\n    data: [org/facts, org/more@v1.0]")
    data = suites.parse(write(tmp_path, text)).tasks[0].data
    assert [suites.located(name) for name in data] == [("org/facts", "main"), ("org/more", "v1.0")]


def test_a_passage_and_a_perplexity(tmp_path: Path) -> None:
    text = SUITE.replace("items: 2000", "items: 2000\n    cluster: passage")
    assert suites.parse(write(tmp_path, text)).tasks[0].cluster == "passage"
    words = SUITE.replace("metric: acc", "metric: word_perplexity\n    expected_spread: 0.02").replace("2000", "62")
    suite = suites.parse(write(tmp_path, words))
    assert suite.tasks[0].kind == "perplexity"
    assert suites.untestable(suite, margin=0.01) == ()
    (sentence,) = suites.untestable(suite, margin=0.005)
    assert "62 items can test a margin of 0.84% or wider, not 0.50%" in sentence
    assert "(spread between documents 2.0%, confidence 95%, power 80%)" in sentence


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("metric: acc", "metrc: acc", 6, "unknown key 'metrc'; did you mean 'metric'"),
        ("metric: acc", "metric: word_perplexity", 6, "metric 'word_perplexity' needs 'expected_spread'"),
        ("items: 2000", "items: 9\n    expected_spread: 0.1", 6, "metric 'acc' has no 'expected_spread'"),
        ("items: 2000", "items: 0", 7, "'items': Input should be greater than or equal to 1, found 0"),
        ("items: 2000", "items: yes", 7, "'items': Input should be a valid integer, found True"),
        ("items: 2000", "items: 2000\n    margin: 1", 8, "'margin': Input should be less than 1, found 1"),
        ("items: 2000", "items: 2000\n    items: 20", 8, "key 'items' appears twice, first on line 7"),
        ("items: 2000", "items: 2000\n    gated: false", 4, "no task is gated"),
        ("    metric: acc\n", "", 5, "missing key 'metric'"),
        ("expected_flip_rate: 0.03\n", "", 1, "missing key 'expected_flip_rate'"),
        ("name: small", "name: smal", 1, "must be the file's name"),
        ("description: One task.", "descriptin: One task.", 2, "did you mean 'description'"),
        ("tasks:", "tasks: []\nx:", 5, "unknown key 'x'"),
        ("  - task: facts", "  - task: facts: x", 5, "not valid YAML"),
        (
            "items: 2000",
            "items: 2000\n    data: org/facts",
            8,
            "'data': Input should be a valid array, found 'org/facts'",
        ),
        ("items: 2000", "items: 2000\n    data: [facts]", 8, "'data': String should match pattern"),
    ],
)
def test_a_broken_suite_is_refused_where_it_is_broken(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    assert old in SUITE
    path = write(tmp_path, SUITE.replace(old, new, 1))
    with pytest.raises(DefinitionError, match=re.escape(words)) as caught:
        suites.parse(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("warmups", "warmup", "unknown key 'warmup'; did you mean 'warmups'"),
        ("num_prompts: 32", "num_prompts: 3", "3 prompts never reach a concurrency of 4"),
        (
            "profile: latency",
            "profile: latnecy",
            "'profile': Input should be 'latency', 'streaming', 'throughput' or 'offline', found 'latnecy'",
        ),
        ("cells:", "cells: 5\nbells:", "unknown key 'bells'; did you mean 'cells'"),
    ],
)
def test_a_broken_workload_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(words)):
        workloads.parse(write(tmp_path, WORKLOAD.replace(old, new, 1)))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(DefinitionError, match="did you mean 'core'"):
        suites.load("cores")
    with pytest.raises(DefinitionError, match="did you mean 'throughput'"):
        workloads.load("troughput")


def test_a_margin_too_small_for_the_suite_is_named(tmp_path: Path) -> None:
    suite = suites.parse(write(tmp_path, SUITE.replace("2000", "400")))
    (sentence,) = suites.untestable(suite, margin=0.01)
    assert sentence.startswith("facts: 400 items can test a margin of 2.58% or wider, not 1.00%")
    assert suites.untestable(suite, margin=0.03) == ()


def test_the_tiny_suite_fits_its_tasks() -> None:
    for task in suites.load("tiny").tasks:
        source = suites.TASKS_FOLDER / f"{task.task}.yaml"
        local = yaml.safe_load(source.read_text())
        data = source.parent / local["dataset_kwargs"]["data_files"]["test"]
        assert len(data.read_text().splitlines()) == task.items
        assert task.metric in {metric["metric"] for metric in local["metric_list"]}
        assert task.filter in {f["name"] for f in local.get("filter_list", [{"name": "none"}])}


def test_a_recipe_may_judge_a_task_by_another_margin_or_not_at_all() -> None:
    suite = suites.load("core")
    judged = {task.task: task for task in suite.judged_by({"gsm8k": 0.03, "wikitext": None}).tasks}
    assert (judged["gsm8k"].margin, judged["gsm8k"].gated) == (0.03, True)
    assert judged["wikitext"].gated is False
    assert judged["mmlu"] == next(task for task in suite.tasks if task.task == "mmlu")


OWN = """\
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: data/facts.jsonl}}
test_split: test
output_type: multiple_choice
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def own(tmp_path: Path, suite: str = SUITE, task: str = OWN, lines: int = 2000) -> Path:
    """A suite by its path, with the definition of its task and data beside it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "facts.jsonl").write_text('{"question": "?"}\n' * lines)
    (tmp_path / "facts.yaml").write_text(task)
    return write(tmp_path, suite)


def test_a_suite_by_its_path_has_its_tasks_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    suite = suites.load(str(path.relative_to(tmp_path.parent)))
    assert (suite.path, suite.own_tasks) == (path, tmp_path)
    assert suite.files(suite.tasks[0]) == (tmp_path / "facts.yaml", tmp_path / "data" / "facts.jsonl")
    assert harness.materialise_tasks(suite.own_tasks, ["facts"], tmp_path / "there") == ("facts",)


@pytest.mark.slow
def test_a_task_that_nobody_defines_is_known_without_importing_lm_eval(tmp_path: Path) -> None:
    suite = suites.load(str(own(tmp_path)))
    (facts,) = suite.tasks
    named = [replace(facts, task=name) for name in ("facts", "gsm8k", "mmlu_stem", "mmlu_stme")]
    assert suites.strangers(replace(suite, tasks=tuple(named))) == ["mmlu_stme"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"suite": SUITE.replace("acc", "exact_match")},
            "yaml:6: metric 'exact_match' is none of facts.yaml's: acc",
        ),
        ({"suite": SUITE + "    filter: first\n"}, "small.yaml:8: filter 'first' is none of facts.yaml's: none"),
        ({"lines": 698}, "small.yaml:7: 2000 items, facts.jsonl has 698"),
        ({"task": OWN.replace("task: facts", "task: other")}, "facts.yaml:1: 'task' must be the file's name, 'facts'"),
        ({"task": OWN.replace("facts.jsonl", "fact.jsonl")}, "facts.yaml:3: found no file fact.jsonl beside it"),
        ({"task": OWN.replace("data/", "../")}, "facts.yaml:3: found no file facts.jsonl beside it"),
        ({"task": OWN + "doc_to_text: !function utils.text\n"}, "not valid YAML"),
        ({"suite": SUITE + "own_tasks: /etc\n"}, "small.yaml:8: unknown key 'own_tasks'"),
    ],
)
def test_what_an_own_suite_gets_wrong_is_known_before_anything_runs(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    path = own(tmp_path, **given)
    with pytest.raises(DefinitionError, match=re.escape(words)):
        suites.load(str(path))
