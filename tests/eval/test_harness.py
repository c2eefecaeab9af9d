"""What the process that runs lm-eval is told."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quantmint.eval import harness
from quantmint.eval.harness import by_leaf, draw, some
from quantmint.eval.harness_child import dataset_of
from quantmint.eval.suites import SuiteTask

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
    (copied,) = (tmp_path / "include").iterdir()
    assert yaml.safe_load(copied.read_text())["dataset_kwargs"]["data_files"]["test"] == [str(tasks / "colours.jsonl")]


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


# Some documents share a passage, most do not.
DOCUMENTS = st.dictionaries(
    st.sampled_from(["law", "art", "physics"]),
    st.lists(st.sampled_from(["", "", "", "p", "q", "r"]), min_size=1, max_size=150),
    min_size=1,
)


@given(DOCUMENTS, st.integers(1, 6), st.integers(0, 99), st.none() | st.integers(1, 200))
def test_every_item_once_and_no_passage_in_two_looks(
    documents: dict[str, list[str]], looks: int, seed: int, limit: int | None
) -> None:
    drawn = draw(documents, looks=looks, seed=seed, limit=limit)
    items = [item for look in drawn for item in look]
    everything = {(leaf, number) for leaf, names in documents.items() for number in range(len(names))}
    assert len(set(items)) == len(items) == min(len(everything), limit or len(everything))
    assert set(items) <= everything
    assert 1 <= len(drawn) <= looks
    assert all(drawn)
    met: dict[str, int] = {}
    for number, look in enumerate(drawn):
        for leaf, document in look:
            if passage := documents[leaf][document]:
                assert met.setdefault(passage, number) == number


def test_the_order_is_on_record() -> None:
    """Files of measurements are paired across machines and years: this order may never change."""
    assert some([("law", n) for n in range(1000)], 4, seed=7) == (
        ("law", 323),
        ("law", 662),
        ("law", 723),
        ("law", 862),
    )
    (first, *_) = draw({"law": [""] * 200, "art": [""] * 200}, looks=4, seed=7)
    assert by_leaf(first[:3] + first[-3:]) == {"art": [4, 8, 10], "law": [191, 194, 196]}


def test_a_limit_keeps_what_a_smaller_one_draws_and_takes_no_first_rows() -> None:
    documents = {"law": [""] * 500}
    (few,) = draw(documents, looks=1, seed=1, limit=50)
    (more,) = draw(documents, looks=1, seed=1, limit=100)
    assert set(few) < set(more)
    assert few != tuple(("law", number) for number in range(50))


def test_looks_are_like_the_whole() -> None:
    """Of a file sorted by subject, each look has every subject in its share: 300 items in 4 looks of 75."""
    drawn = draw({"sorted": [""] * 1200}, looks=4, seed=3)
    assert [len(look) for look in drawn] == [300] * 4
    for look in drawn:
        assert 100 < sum(number < 600 for _, number in look) < 200


def test_one_passage_for_all_is_one_look() -> None:
    assert [len(look) for look in draw({"one": ["same"] * 400}, looks=4, seed=0)] == [400]
