"""Workloads: rates, files of prompts and latency goals, refused where they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantmint.eval import workloads
from quantmint.eval.errors import DefinitionError
from quantmint.eval.prompts import PromptFile
from quantmint.eval.workloads import Cell

LOAD = """\
name: load
description: Everything that a workload may say.
profile: streaming
goodput: {ttft: 500, tpot: 40}
cells:
  - name: random
    input_len: 64
    output_len: 32
    concurrency: 4
    num_prompts: 32
    warmups: 4
  - name: talks
    dataset: {sharegpt: talks.json}
    rate: 2.5
    num_prompts: 32
    warmups: 4
    goodput: {e2el: 4000}
  - name: lines
    dataset: {jsonl: lines.jsonl, chat_template: false}
    input_len: 100
    rate: inf
    num_prompts: 3
    warmups: 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "talks.json").write_text("[]")
    rows = ({"prompt": f"p{n}", "output_tokens": 10 * n + 1} for n in range(3))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return tmp_path


def parse(folder: Path, text: str = LOAD) -> workloads.Workload:
    path = folder / "load.yaml"
    path.write_text(text)
    return workloads.parse(path)


def test_every_kind_of_cell(folder: Path) -> None:
    load = parse(folder)
    chat = (("ttft", 500.0), ("tpot", 40.0))
    talks, lines = PromptFile("sharegpt", folder / "talks.json"), PromptFile("jsonl", folder / "lines.jsonl", False)
    assert load.cells == (
        Cell("random", 64, 32, 4, 32, 4, goodput=chat),
        Cell("talks", 1024, None, None, 32, 4, 2.5, talks, ignore_eos=False, goodput=(("e2el", 4000.0),)),
        Cell("lines", 100, None, None, 3, 0, None, lines, ignore_eos=False, goodput=chat),
    )
    assert [cell.longest for cell in load.cells] == [96, 2048, 121]
    assert (load.longest, load.in_flight) == (2048, 32)
    assert [cell.output_tokens for cell in load.cells] == [(768, 1024), None, None]


def test_a_file_is_its_content(folder: Path) -> None:
    def identities() -> list[str]:
        return [json.dumps(cell.to_json(), allow_nan=False) for cell in parse(folder).cells]

    before = identities()
    assert str(folder) not in "".join(before)
    (folder / "talks.json").write_text("[ ]")
    assert [old == new for old, new in zip(before, identities(), strict=True)] == [True, False, True]


def test_a_cell_of_the_first_kind_is_called_what_it_always_was(folder: Path) -> None:
    """Results that lie in a store stay valid."""
    assert Cell("a", 1, 2, 3, 4, 5).to_json() == {
        "name": "a", "input_len": 1, "output_len": 2, "concurrency": 3, "num_prompts": 4, "warmups": 5,
    }  # fmt: skip


def test_a_workload_by_its_path(folder: Path) -> None:
    load = parse(folder)
    assert workloads.load(str(folder / "load.yaml")) == load


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("concurrency: 4", "concurency: 4", 9, "unknown key 'concurency'; did you mean 'concurrency'"),
        ("    concurrency: 4\n", "", 6, "missing key 'concurrency' or 'rate'"),
        ("rate: 2.5", "rate: 0", 14, "'rate': Input should be greater than 0, found 0"),
        ("rate: inf", "rate: fast", 21, "'rate': Input should be a valid number, found 'fast'"),
        ("e2el: 4000", "e2e: 4000", 17, "unknown key 'e2e'; did you mean 'e2el'"),
        ("e2el: 4000", "e2el: -1", 17, "'e2el': Input should be greater than 0, found -1"),
        ("{e2el: 4000}", "4000", 17, "'goodput': Input should be an object, found 4000"),
        ("talks.json", "talk.json", 13, "found no file"),
        ("{sharegpt: talks.json}", "sharegpt", 13, "'dataset': Input should be"),
        ("{sharegpt: talks.json}", "{sharegtp: talks.json}", 13, "unknown key 'sharegtp'; did you mean 'sharegpt'"),
        ("{sharegpt: talks.json}", "{chat_template: true}", 13, "must name one file"),
        ("{sharegpt: talks.json}", "{jsonl: talks.json}", 13, "whose name ends in .jsonl, found talks.json"),
        ("sharegpt: talks.json", "sharegpt: talks.json, chat_template: true", 13, "goes with a jsonl file"),
        ("    rate: 2.5", "    rate: 2.5\n    input_len: 5", 15, "'input_len' goes with random prompts and jsonl"),
        ("    rate: 2.5", "    rate: 2.5\n    output_len: 2048", 15, "'output_len' must be below 2048"),
        ("    input_len: 100\n", "", 18, "missing key 'input_len'"),
        ("num_prompts: 3\n", "num_prompts: 4\n", 22, "4 prompts are more than the 3 of"),
        ("    output_len: 32\n", "", 6, "missing key 'output_len'"),
        ("    output_len: 32\n", "    output_len: 32\n    ignore_eos: false\n", 9, "always true for random prompts"),
        ("name: talks\n", "name: ../talks\n", 12, "'name': String should match pattern"),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(folder: Path, old: str, new: str, line: int, words: str) -> None:
    assert old in LOAD
    with pytest.raises(DefinitionError, match=re.escape(words)) as caught:
        parse(folder, LOAD.replace(old, new, 1))
    assert str(caught.value).startswith(f"{folder / 'load.yaml'}:{line}: ")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("prompt", "not JSON"),
        ('["prompt"]', "not a _Line"),
        ('{"prompt": ""}', "prompt: String should match"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens: Input should be greater than or equal to 1, found 0"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(folder: Path, row: str, words: str) -> None:
    path = folder / "lines.jsonl"
    path.write_text('{"prompt": "fine", "output_tokens": 3}\n' + row + "\n")
    with pytest.raises(DefinitionError, match=re.escape(words)) as caught:
        parse(folder)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_file_without_lengths_needs_one(folder: Path) -> None:
    (folder / "lines.jsonl").write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(DefinitionError, match="missing key 'output_len': not every line"):
        parse(folder)
    load = parse(folder, LOAD.replace("    input_len: 100\n", "    input_len: 100\n    output_len: 8\n"))
    assert load.cells[2].longest == 108
