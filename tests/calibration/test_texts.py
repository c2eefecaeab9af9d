from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet
from calibration.texts import read_texts


def set_of(path: Path, *lines: object, **columns: Any) -> CalibrationSet:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)}\n" for line in lines),
        encoding="utf-8",
    )
    return CalibrationSet(name="own", description="of a test", file=path, **columns)


def test_plain_text_is_read_in_the_files_order(tmp_path: Path, letters: Any) -> None:
    chosen = set_of(tmp_path / "a.jsonl", {"t": "one"}, {"t": "zwei\u2028drei"}, {"t": 4}, text="t")
    assert read_texts(chosen, letters) == ["one", "zwei\u2028drei", "4"]


def test_blank_lines_are_skipped(tmp_path: Path, letters: Any) -> None:
    assert read_texts(set_of(tmp_path / "a.jsonl", {"t": "one"}, "", {"t": "two"}, " ", text="t"), letters) == [
        "one",
        "two",
    ]


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, letters: Any) -> None:
    chosen = set_of(tmp_path / "a.jsonl", text="t")
    (tmp_path / "a.jsonl").write_bytes(b'{"t": "\xff"}')
    with pytest.raises(CalibrationError, match=r"a\.jsonl: not UTF-8"):
        read_texts(chosen, letters)


def test_a_template_that_refuses_names_the_row(tmp_path: Path, letters: Any) -> None:
    def refuse(messages: object, tokenize: bool) -> str:
        raise RuntimeError("roles must alternate")

    letters.chat_template, letters.apply_chat_template = "given", refuse
    chosen = set_of(tmp_path / "a.jsonl", {"m": []}, messages="m")
    with pytest.raises(CalibrationError, match=r"row 1 of own .*roles must alternate"):
        read_texts(chosen, letters)


def test_turns_without_a_template_are_joined(tmp_path: Path, letters: Any) -> None:
    chosen = set_of(tmp_path / "a.jsonl", {"q": "why", "a": "so"}, turns=(("user", "q"), ("assistant", "a")))
    assert read_texts(chosen, letters) == ["why\nso"]


def test_conversations_are_rendered_by_the_models_template(tmp_path: Path, letters: Any) -> None:
    letters.chat_template = "given"
    letters.apply_chat_template = lambda messages, tokenize: f"{tokenize} {[m['role'] for m in messages]}"
    row = {"m": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
    assert read_texts(set_of(tmp_path / "a.jsonl", row, messages="m"), letters) == ["False ['user', 'assistant']"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[1]", r"a\.jsonl:2: expected a JSON object"),
        ('{"u": 1}', "row 2 .*no column 't', only u"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, letters: Any, line: str, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        read_texts(set_of(tmp_path / "a.jsonl", {"t": "good"}, line, text="t"), letters)


def test_an_empty_set_is_refused(tmp_path: Path, letters: Any) -> None:
    with pytest.raises(CalibrationError, match="the calibration set own is empty"):
        read_texts(set_of(tmp_path / "a.jsonl", text="t"), letters)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, letters: Any) -> None:
    chosen = CalibrationSet(name="own", description="", file=tmp_path / "absent.jsonl", text="t")
    with pytest.raises(CalibrationError, match=r"absent\.jsonl: cannot be read"):
        read_texts(chosen, letters)


def test_a_conversation_that_is_none_is_named(tmp_path: Path, letters: Any) -> None:
    for row in ({"m": "text"}, {"m": [{"role": "user"}]}, {"m": [1]}):
        with pytest.raises(CalibrationError, match="row 1 of own"):
            read_texts(set_of(tmp_path / "a.jsonl", row, messages="m"), letters)
