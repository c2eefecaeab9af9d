"""What the process that runs lm-eval is told."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from eval import harness
from eval.errors import DefinitionError
from eval.harness_child import dataset_of
from eval.suites import SuiteTask

TASK = {"task": "colours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "colours.jsonl"}}}
ENDPOINT = harness.Endpoint("http://127.0.0.1:8000/", "base", Path("models/a,b"), 512, seed=7, concurrency=4)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text(yaml.safe_dump(TASK))
    (folder / "colours.jsonl").write_text("{}\n")
    return folder


def test_messages_are_json(tmp_path: Path) -> None:
    opening = harness.opening(ENDPOINT, tmp_path, only_ours=True)["open"]
    assert json.loads(json.dumps(opening)) == opening
    assert opening["model"]["base_url"] == "http://127.0.0.1:8000/v1/completions"
    task = SuiteTask("colours", "acc", 12, 0.03, num_fewshot=3, chat=True)
    told = json.loads(json.dumps(harness.loading(task, {"org/colours": "c" * 40})))["load"]
    assert (told["task"], told["commits"]) == ({**asdict(task), "data": []}, {"org/colours": "c" * 40})
    asking = harness.asking(task, {"colours": [1, 5]}, tmp_path / "0.gz")["ask"]
    assert asking == {"task": "colours", "documents": {"colours": [1, 5]}, "destination": str(tmp_path / "0.gz")}


def test_tasks_of_lm_eval_are_left_to_it(tmp_path: Path, tasks: Path) -> None:
    assert harness.materialise_tasks(tasks, ["colours", "gsm8k"], tmp_path / "include") == ("colours",)
    assert [path.name for path in (tmp_path / "include").iterdir()] == ["colours.yaml"]


def test_data_files_become_absolute_in_every_form(tmp_path: Path, tasks: Path) -> None:
    for files in ("colours.jsonl", ["colours.jsonl"], {"test": ["colours.jsonl"]}):
        (tasks / "colours.yaml").write_text(yaml.safe_dump(TASK | {"dataset_kwargs": {"data_files": files}}))
        harness.materialise_tasks(tasks, ["colours"], tmp_path / "include")
        text = (tmp_path / "include" / "colours.yaml").read_text()
        assert str(tasks / "colours.jsonl") in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_kwargs": {"data_files": "gone.jsonl"}}, "gone.jsonl does not exist"),
        ({"dataset_kwargs": {}}, "not a local lm-eval task with data_files"),
        ({"task": "colors"}, "'task' must be the file's name, 'colours'"),
    ],
)
def test_broken_task_files(tmp_path: Path, tasks: Path, change: dict[str, object], words: str) -> None:
    (tasks / "colours.yaml").write_text(yaml.safe_dump(TASK | change))
    with pytest.raises(DefinitionError, match=words):
        harness.materialise_tasks(tasks, ["colours"], tmp_path / "include")


def test_the_commit_of_a_data_set_is_what_datasets_remembers() -> None:
    from types import SimpleNamespace

    from datasets import Dataset, DatasetDict, DatasetInfo

    def task(path: str, *files: str) -> SimpleNamespace:
        checksums = {file: {"num_bytes": 1, "checksum": None} for file in files}
        split = Dataset.from_dict({"a": [1]}, info=DatasetInfo(download_checksums=checksums))
        return SimpleNamespace(
            config=SimpleNamespace(dataset_path=path, dataset_name="main"), dataset=DatasetDict(test=split)
        )

    first, second = "e5" * 20, "7a" * 20
    file = "hf://datasets/openai/gsm8k@{}/main/test-00000-of-00001.parquet"
    assert dataset_of(task("openai/gsm8k", file.format(first))) == {
        "path": "openai/gsm8k", "name": "main", "commit": first,
    }  # fmt: skip
    both = dataset_of(task("openai/gsm8k", file.format(first), file.format(second)))
    assert both is not None
    assert both["commit"] == f"{second}, {first}"
    unknown = dataset_of(task("openai/gsm8k", "/tmp/test.parquet"))
    assert unknown is not None
    assert unknown["commit"] is None
    assert dataset_of(task("json")) is None
