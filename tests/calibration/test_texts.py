from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quantmint.calibration.batches import read_texts, rendered, require_texts
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import CalibrationSet


def set_of(path: Path, *lines: object, **columns: Any) -> CalibrationSet:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)}\n" for line in lines),
        encoding="utf-8",
    )
    return CalibrationSet(name="own", description="of a test", file=path, **columns)


def texts_of(chosen: CalibrationSet, tokenizer: Any) -> list[str]:
    return list(read_texts(chosen, tokenizer))


def test_plain_text_is_read_in_the_files_order(tmp_path: Path, letters: Any) -> None:
    chosen = set_of(tmp_path / "a.jsonl", {"t": "one"}, {"t": "zwei\u2028drei"}, {"t": 4}, text="t")
    assert texts_of(chosen, letters) == ["one", "zwei\u2028drei", "4"]


@pytest.mark.parametrize(
    ("lines", "packing", "words"),
    [
        (["{}"], True, "a.jsonl:1: has no column 't'"),
        ([{"t": "one"}, {"t": None}], True, "a.jsonl:2: t is null, expected text"),
        ([], True, "the calibration set own is empty"),
        ([{"t": "one"}], False, "a.jsonl: found 1 texts, expected one for each of 4 samples"),
    ],
)
def test_what_a_file_lacks_is_known_without_a_model(
    tmp_path: Path, lines: list[object], packing: bool, words: str
) -> None:
    chosen = set_of(tmp_path / "a.jsonl", *lines, text="t")
    with pytest.raises(CalibrationError, match=re.escape(words)):
        require_texts(chosen, samples=4, packing=packing)
    require_texts(set_of(tmp_path / "b.jsonl", *[{"t": "one"}] * 4, "{", text="t"), samples=4, packing=packing)


def test_no_more_is_read_than_is_asked_for(tmp_path: Path, letters: Any) -> None:
    texts = read_texts(set_of(tmp_path / "a.jsonl", {"t": "one"}, {"t": "two"}, "{", text="t"), letters)
    assert [next(texts), next(texts)] == ["one", "two"]
    with pytest.raises(CalibrationError, match=r"a\.jsonl:3: not JSON"):
        next(texts)


def test_a_template_that_refuses_names_the_row(tmp_path: Path, letters: Any) -> None:
    def refuse(messages: object, tokenize: bool) -> str:
        raise RuntimeError("roles must alternate")

    letters.chat_template, letters.apply_chat_template = "given", refuse
    chosen = set_of(tmp_path / "a.jsonl", {"m": []}, messages="m")
    with pytest.raises(CalibrationError, match=r"a\.jsonl:1: .*roles must alternate"):
        texts_of(chosen, letters)


def test_turns_without_a_template_are_joined(tmp_path: Path, letters: Any) -> None:
    chosen = set_of(tmp_path / "a.jsonl", {"q": "why", "a": "so"}, turns=(("user", "q"), ("assistant", "a")))
    assert texts_of(chosen, letters) == ["why\nso"]
    assert not rendered(chosen, letters), "nothing has written its special tokens"


def test_conversations_are_rendered_by_the_models_template(tmp_path: Path, letters: Any) -> None:
    letters.chat_template = "given"
    letters.apply_chat_template = lambda messages, tokenize: f"{tokenize} {[m['role'] for m in messages]}"
    row = {"m": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
    chosen = set_of(tmp_path / "a.jsonl", row, messages="m")
    assert texts_of(chosen, letters) == ["False ['user', 'assistant']"]
    assert rendered(chosen, letters)


def test_a_set_may_want_conversations_without_the_template(tmp_path: Path, letters: Any) -> None:
    letters.chat_template, letters.apply_chat_template = "given", None
    chosen = set_of(tmp_path / "a.jsonl", {"m": [{"role": "user", "content": "why"}]}, messages="m", chat=False)
    assert texts_of(chosen, letters) == ["why"]
    assert not rendered(chosen, letters)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[1]", r"a\.jsonl:2: expected a JSON object"),
        ('{"u": 1}', r"a\.jsonl:2: has no column 't', only u"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, letters: Any, line: str, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        texts_of(set_of(tmp_path / "a.jsonl", {"t": "good"}, line, text="t"), letters)


def test_an_empty_set_is_refused(tmp_path: Path, letters: Any) -> None:
    with pytest.raises(CalibrationError, match="the calibration set own is empty"):
        texts_of(set_of(tmp_path / "a.jsonl", text="t"), letters)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent.txt"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, letters: Any, name: str) -> None:
    chosen = CalibrationSet(name="own", description="", file=tmp_path / name, text="text")
    with pytest.raises(CalibrationError, match=rf"{name}: cannot be read"):
        texts_of(chosen, letters)
