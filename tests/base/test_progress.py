"""Progress as a log, a terminal and a program receive it."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.pipeline.base.progress import PlainReporter, Reporter

ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# A line as other programs write it: colours, a carriage return, brackets, a closing tag.
ALIEN = "\x1b[31mWARNING\x1b[0m 12-01 [loader.py:7] at [/opt/model]\r 50 %|\x07 [bold]"


def tell(reporter: Reporter, message: str) -> None:
    reporter.started("quantize", 3, 13)
    reporter.cached("source", 1, 13, message)
    reporter.finished("quantize", 3, 13, 1.25, message)
    reporter.say(message)
    reporter.warn(message)
    with reporter.bar(100, "samples") as advance:
        for _ in range(100):
            advance(1)


def test_a_log_has_plain_lines_only() -> None:
    stream = io.StringIO()
    tell(PlainReporter(stream), "all well")
    assert stream.getvalue().splitlines() == [
        "[3/13] quantize: started",
        "[1/13] source: cached: all well",
        "[3/13] quantize: done in 1.2 s: all well",
        "    all well",
        "    warning: all well",
        "    100 % of 100 samples",
    ]


def test_a_log_gets_a_line_a_minute_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), itertools.count(step=25)
    monkeypatch.setattr("quantmint.pipeline.base.progress.time.monotonic", lambda: next(clock))
    with PlainReporter(stream).bar(10, "samples") as advance:
        for _ in range(10):
            advance(1)
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["30", "60", "90", "100"]


def test_quoted_text_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    tell(PlainReporter(stream), ALIEN)
    assert CONTROL.search(stream.getvalue()) is None
    assert "warning: WARNING 12-01 [loader.py:7] at [/opt/model] 50 %| [bold]" in stream.getvalue()


_TELL = """
import sys
from quantmint.pipeline.base.progress import reporter_for
reporter = reporter_for(json="--json" in sys.argv)
with reporter.bar(3, sys.argv[1]) as advance:
    for _ in range(3):
        advance(1)
reporter.finished("quantize", 3, 13, 1.0, "all well")
"""


def on_a_terminal(*arguments: str) -> str:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", _TELL, *arguments], stderr=slave, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize(("unit", "amount"), [("samples", "3/3"), ("B", "3/3 bytes")])
def test_a_terminal_gets_bars(unit: str, amount: str) -> None:
    seen = on_a_terminal(unit)
    assert "━" in seen
    assert "\x1b[" in seen
    assert amount in seen
