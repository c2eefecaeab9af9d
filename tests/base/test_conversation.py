"""Questions to a running program: replies, refusals, and a program that ends too early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import InvalidMeasurementError, StageError
from quantmint.pipeline.base.processes import conversation
from tests.processes import processes_naming

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[-1].replace("@", "\\0", 1))
lines = connection.makefile("rw")
def tell(**message):
    lines.write(json.dumps(message) + "\\n"); lines.flush()
for line in lines:
    message = json.loads(line)
    if message["what"] == "add":
        tell(expect=2); tell(done=1); tell(done=1)
        tell(reply={"sum": sum(message["numbers"])})
    elif message["what"] == "refuse":
        tell(refused="no such thing")
    else:
        sys.exit("the last words")
"""
OWNER = """
import sys
from pathlib import Path
from quantmint.pipeline.base.processes import conversation
with conversation([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[3]), what="it", env={}) as talk:
    talk.ask({"what": "add", "numbers": []})
    Path(sys.argv[4]).touch()
    import time; time.sleep(600)
"""


def argv(marker: str = "x") -> list[str]:
    return [sys.executable, "-c", PROGRAM, marker]


def test_questions_get_news_and_replies(tmp_path: Path) -> None:
    news: list[Mapping[str, Any]] = []
    with conversation(argv(), tmp_path / "log", what="it", env={}) as talk:
        assert talk.ask({"what": "add", "numbers": [1, 2]}, news.append) == {"sum": 3}
        with pytest.raises(InvalidMeasurementError, match=r"^no such thing$"):
            talk.ask({"what": "refuse"})
        assert talk.ask({"what": "add", "numbers": [5]}) == {"sum": 5}
    assert news == [{"expect": 2}, {"done": 1}, {"done": 1}]


def test_a_program_that_ends_before_it_answers_is_quoted(tmp_path: Path) -> None:
    with conversation(argv(), tmp_path / "log", what="it", env={}) as talk:
        with pytest.raises(StageError, match=r"^it ended with exit code 1: the last words"):
            talk.ask({"what": "end"})
        with pytest.raises(StageError, match=r"^it ended with exit code 1: the last words"):
            talk.ask({"what": "add", "numbers": []})
    mute = conversation([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "other", what="it", env={})
    with pytest.raises(StageError, match=r"^it ended with exit code 3: it printed nothing"), mute:
        raise AssertionError("it never came")


def test_a_connection_of_another_user_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.geteuid() + 1, os.geteuid()])
    monkeypatch.setattr("quantmint.pipeline.base.processes._user_of", lambda _: next(users))
    first = PROGRAM.replace("lines =", "turned_away = connection.recv(1)\nconnection = socket.socket(socket.AF_UNIX)\n"
                            'connection.connect(sys.argv[-1].replace("@", "\\0", 1))\nlines =')  # fmt: skip
    with conversation([sys.executable, "-c", first], tmp_path / "log", what="it", env={}) as talk:
        assert talk.ask({"what": "add", "numbers": [1]}) == {"sum": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_ends_with_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    marker = f"conversation-{time.time_ns()}"
    ready = tmp_path / "ready"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, PROGRAM, marker, str(tmp_path / "log"), str(ready)], cwd=ROOT
    )
    while not ready.exists():
        assert owner.poll() is None
        time.sleep(0.05)
    owner.send_signal(number)
    owner.wait(timeout=20)
    deadline = time.monotonic() + 30
    while (left := processes_naming(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == ()
