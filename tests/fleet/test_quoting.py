from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.fleet.attempt import child_variables
from pipeline.fleet.quoting import last_line, quotable

SECRET = "kR7-secret-9"
OURS = {"HF_TOKEN": SECRET, "TOKENIZERS_PARALLELISM": "false-false", "SHORT_TOKEN": "abc", "PATH": "/usr/local/bin"}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("401 for kR7-secret-9", "401 for [secret]"),
        ("abc /usr/local/bin false-false", "abc /usr/local/bin false-false"),
        ("hf_AbCdEfGhIjKlMnOpQrSt was refused", "[secret] was refused"),
        ("https://me:pass@host/a is away", "https://host/a is away"),
        ("https://cdn/x?Signature=abc&y=1 is away", "https://cdn/x is away"),
        ("\x1b[31mtwo\n  lines\x1b[0m\x07", "two lines"),
    ],
)
def test_what_a_child_says_is_one_line_without_secrets(said: str, shown: str) -> None:
    assert quotable(said, OURS) == shown


def test_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_line(log, OURS) == ""
    log.write_bytes(b"first\n" * 50_000 + b"50 %\r100 %\rbroke: \xff kR7-secret-9\n \n\n")
    assert last_line(log, OURS) == "broke: � [secret]"
    log.write_bytes(b"\n")
    assert last_line(log, OURS) == ""


def test_a_child_does_not_learn_who_is_told() -> None:
    ours = {**OURS, "QUANTMINT_WEBHOOK": "https://x", "QUANTMINT_WEBHOOK_SECRET": "y", "QUANTMINT_STORE": "z"}
    assert child_variables(ours) == {**OURS, "QUANTMINT_STORE": "z"}
