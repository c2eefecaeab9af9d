"""The definitions of calibration sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration.errors import CalibrationError
from calibration.sets import FOLDER, load_set, names


def test_shipped_sets() -> None:
    assert names() == ("open-platypus", "tiny", "ultrachat")
    assert all(load_set(name).name == name for name in names())
    tiny = load_set("tiny")
    assert tiny.file == FOLDER.parent / "data" / "tiny.jsonl"
    assert (tiny.repo, tiny.revision, tiny.split, tiny.text) == (None, None, None, "text")
    chats = load_set("ultrachat")
    assert (chats.repo, chats.split, chats.messages) == ("HuggingFaceH4/ultrachat_200k", "train_sft", "messages")
    assert load_set("open-platypus").turns == (("user", "instruction"), ("assistant", "output"))
    assert len({hash(load_set(name)) for name in names()}) == 3


def test_a_set_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndescription: Ours.\nrepo: org/data\ntext: body\n")
    mine = load_set(str(path))
    assert (mine.repo, mine.revision, mine.split, mine.config) == ("org/data", "main", "train", None)


def test_unknown_set() -> None:
    with pytest.raises(CalibrationError) as refused:
        load_set("ultrachatt")
    assert str(refused.value) == (
        'found no calibration set "ultrachatt", expected one of open-platypus, tiny, ultrachat '
        '(did you mean "ultrachat"?)'
    )


HEAD = "name: m\ndescription: d\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "fil: a\ntext: t\n", 'fil: found an unknown key, expected one of .* \\(did you mean "file"\\?\\)'),
        (HEAD + "file: a\n", "found none of them, expected exactly one of text, messages, turns"),
        (HEAD + "file: a\nrepo: b\ntext: t\n", "found file with repo, expected exactly one of file, repo"),
        (HEAD + "file: a\ntext: t\nsplit: s\n", "split: found it beside a file, expected it with a repo only"),
        (HEAD + "file: 3\ntext: t\n", "file: found 3, expected text"),
        (HEAD + "file: a\nturns: [x]\n", "turns: expected a mapping of roles to columns"),
        (HEAD + "file: a\nturns: {userr: x}\n", 'userr: found an unknown key, .* \\(did you mean "user"\\?\\)'),
        (HEAD + "file: a\nturns: {user: 3}\n", "user: found 3, expected text"),
        ("name: m\nfile: a\ntext: t\n", "description: found nothing, expected text"),
        ("name: n\ndescription: d\nfile: a\ntext: t\n", 'name: found "n", expected the name of its file, "m"'),
        ("- a\n", "expected a mapping"),
        ("a: [\n", "not a YAML file"),
    ],
)
def test_faults(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=expected):
        load_set(str(path))
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_set(str(tmp_path / "gone.yaml"))
