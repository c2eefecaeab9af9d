"""A child of a fleet: how long it may run, what is read in its log, and what of its words is repeated."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from quantmint.pipeline.upkeep.fleet.attempt import Attempted, RecipeProcess, last_line, quotable

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


def test_the_last_line_that_says_something() -> None:
    assert last_line("first\n50 %\r100 %\rbroke: kR7-secret-9\n \n\n", OURS) == "broke: [secret]"
    assert last_line("\n", OURS) == ""


_ENDS = "import sys, time\nprint('[1/2] source: started', file=sys.stderr, flush=True)\ntime.sleep(60)"


def tried(tmp_path: Path, code: str, limit_s: float | None, *, stop: bool = False) -> Attempted:
    attempt = RecipeProcess(
        [sys.executable, "-S", "-c", code], tmp_path / "one.log", {}, grace_s=5, limit_s=limit_s, queues=True
    )
    if stop:
        attempt.stop()
    while attempt.running:
        attempt.watch()
        time.sleep(0.01)
    return attempt.result()


def test_what_waits_is_not_ended(tmp_path: Path) -> None:
    """A job that a cluster has no room for yet: its time begins with its first stage."""
    ended = tried(tmp_path, 'import time\ntime.sleep(0.3)\nprint(\'{"verdict": "PASS"}\')', limit_s=0.0)
    assert (ended.cut_short, ended.answer) == (False, {"verdict": "PASS"})


def test_what_runs_is_ended(tmp_path: Path) -> None:
    ended = tried(tmp_path, _ENDS, limit_s=0.0)
    assert ended.cut_short
    assert "refresh.max_hours" in ended.error


def test_what_was_stopped_while_it_waited_ran_for_no_time(tmp_path: Path) -> None:
    ended = tried(tmp_path, "import time\ntime.sleep(60)", limit_s=None, stop=True)
    assert (ended.cut_short, ended.seconds) == (True, 0.0)
