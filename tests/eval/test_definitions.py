"""Suites and workloads: what is shipped is testable, what is misspelt is refused where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from eval import suites, workloads
from eval.errors import DefinitionError

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


@pytest.mark.parametrize("name", suites.names())
def test_shipped_suites_can_test_a_margin_of_one_point(name: str) -> None:
    assert suites.untestable(suites.load(name), margin=0.01) == ()


@pytest.mark.slow
def test_shipped_suites_name_tasks_metrics_and_filters_of_lm_eval() -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    known = set(TaskManager().all_tasks)
    folders = [path for path in (Path(lm_eval.__file__).parent / "tasks").iterdir() if path.is_dir()]
    shipped = [suites.load(name) for name in suites.names() if name != "tiny"]
    for task in (task for suite in shipped for task in suite.tasks):
        assert task.task in known
        folder = max((f for f in folders if task.task.startswith(f.name)), key=lambda f: len(f.name))
        text = "\n".join(path.read_text() for path in folder.rglob("*yaml"))
        assert f"metric: {task.metric}" in text
        assert task.filter == "none" or f'name: "{task.filter}"' in text


@pytest.mark.parametrize("name", workloads.names())
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


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("metric: acc", "metrc: acc", 6, "unknown key 'metrc'; did you mean 'metric'"),
        ("items: 2000", "items: 0", 7, "'items' must be at least 1, found 0"),
        ("items: 2000", "items: yes", 7, "'items' must be a whole number, found True"),
        ("items: 2000", "items: 2000\n    margin: 1", 8, "'margin' is a fraction between 0 and 1"),
        ("items: 2000", "items: 2000\n    items: 20", 8, "key 'items' appears twice, first on line 7"),
        ("items: 2000", "items: 2000\n    gated: false", 4, "no task is gated"),
        ("    metric: acc\n", "", 5, "missing key 'metric', expected text"),
        ("expected_flip_rate: 0.03\n", "", 1, "missing key 'expected_flip_rate'"),
        ("name: small", "name: smal", 1, "must be the file's name"),
        ("description: One task.", "descriptin: One task.", 2, "did you mean 'description'"),
        ("tasks:", "tasks: []\nx:", 5, "unknown key 'x'"),
        ("  - task: facts", "  - task: facts: x", 5, "not valid YAML"),
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
        ("profile: latency", "profile: latnecy", "no profile 'latnecy': expected one of latency, streaming"),
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
    assert sentence.startswith("facts: 400 items can test a margin of 2.15% or wider, not 1.00%")
    assert suites.untestable(suite, margin=0.03) == ()


def test_the_tiny_suite_fits_its_tasks() -> None:
    for task in suites.load("tiny").tasks:
        source = suites.TASKS_FOLDER / f"{task.task}.yaml"
        local = yaml.safe_load(source.read_text())
        data = source.parent / local["dataset_kwargs"]["data_files"]["test"]
        assert len(data.read_text().splitlines()) == task.items
        assert task.metric in {metric["metric"] for metric in local["metric_list"]}
        assert task.filter in {f["name"] for f in local.get("filter_list", [{"name": "none"}])}
