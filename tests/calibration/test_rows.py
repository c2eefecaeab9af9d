"""Rows of real Parquet files, of text files, and of datasets as the library `datasets` gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantmint.calibration.batches import read_rows, read_texts, samples_of
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import CalibrationSet

Given = Callable[..., CalibrationSet]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return lambda name, **more: CalibrationSet(name="own", description="", file=tmp_path / name, **more)


def rows_of(chosen: CalibrationSet) -> list[Any]:
    return [row for _, row in read_rows(chosen)]


def test_parquet_gives_its_rows(given: Given, tmp_path: Path) -> None:
    table = pa.table({"body": ["one", "two", "three"], "other": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    chosen = given("a.parquet", text="body")
    assert list(read_rows(chosen)) == [
        (f"row {number} of {tmp_path / 'a.parquet'}", {"body": text, "other": number})
        for number, text in enumerate(("one", "two", "three"), start=1)
    ]


def test_parquet_holds_conversations(given: Given, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    pq.write_table(pa.table({"messages": [talk, talk[:1]]}), tmp_path / "a.parquet")
    assert rows_of(given("a.parquet", messages="messages")) == [{"messages": talk}, {"messages": talk[:1]}]


def test_parquet_without_the_column_is_refused(given: Given, tmp_path: Path, letters: Any) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(CalibrationError, match=r"row 1 of .*a\.parquet: has no column 'text', only a, b"):
        list(read_texts(given("a.parquet", text="text"), letters))


TEXT = "\n\none\r\ntwo \u2028 three\n\n \nfour\nfive"


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", [(3, "one"), (4, "two \u2028 three"), (7, "four"), (8, "five")]),
        ("paragraph", [(3, "one\r\ntwo \u2028 three"), (7, "four\nfive")]),
        ("document", [(1, "one\r\ntwo \u2028 three\n\n \nfour\nfive")]),
    ],
)
def test_a_text_file_is_cut_by_line_paragraph_or_not_at_all(
    given: Given, tmp_path: Path, sample_by: str, expected: list[tuple[int, str]]
) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    found = list(read_rows(given("a.txt", text="text", sample_by=sample_by)))
    assert found == [(f"{tmp_path / 'a.txt'}:{line}", {"text": text}) for line, text in expected]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A dataset of two files in Parquet, as it lies on the Hub."""
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(2):
        table = pa.table({"text": [f"row {part * 1500 + number}" for number in range(1500)]})
        pq.write_table(table, folder / f"train-0000{part}-of-00002.parquet")
    return folder


@pytest.mark.parametrize("offline", [True, False])
def test_a_dataset_is_read_in_its_order(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: bool
) -> None:
    """A real one, by the library that reads those of the Hub, streamed and from its cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    chosen = CalibrationSet(name="own", description="", repo=str(repository), split="train", text="text")
    rows = read_rows(chosen)
    assert [next(rows) for _ in range(3)] == [(f"row {n + 1} of own", {"text": f"row {n}"}) for n in range(3)]
    assert len(list(rows)) == 2997


def test_of_a_large_dataset_only_the_first_windows_are_read(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    taken: list[int] = []

    def load_dataset(*where: str | None, **how: Any) -> Any:
        asked.update(how, where=where)
        return ({"text": f"{taken.append(number) or number:08}"} for number in range(10**9))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    commit = "a" * 40
    chosen = CalibrationSet(
        name="own", description="", repo="org/data", config="3.0.0", revision=commit, split="train", text="text"
    )
    samples = samples_of(read_texts(chosen, letters), letters, samples=100, sequence_length=50, packing=True, seed=0)
    assert [len(sample) for sample in samples] == [50] * 100
    assert taken == list(range(1024))
    assert asked == {"where": ("org/data", "3.0.0"), "split": "train", "revision": commit, "streaming": True}


def test_rows_of_all_kinds_make_the_same_samples(given: Given, tmp_path: Path, letters: Any) -> None:
    texts = [f"text {number}" for number in range(40)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    made = [
        [
            sample.tolist()
            for sample in samples_of(
                read_texts(given(f"a.{kind}", text="text"), letters),
                letters,
                samples=8,
                sequence_length=16,
                packing=True,
                seed=3,
            )
        ]
        for kind in ("txt", "jsonl", "parquet")
    ]
    assert made[0] == made[1] == made[2]
