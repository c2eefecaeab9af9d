"""A recipe's hours begin when a cluster has room for it: what waits there has not used them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.fleet.attempt import Attempted, attempt
from pipeline.submit.attached import Mark, Now, run_attached
from pipeline.submit.task import Task
from tests.submit.cases import task

_ENDS = "import sys, time\nprint('job has found room', file=sys.stderr, flush=True)\ntime.sleep(60)"


def tried(tmp_path: Path, code: str, limit_s: float | None, stop: threading.Event | None = None) -> Attempted:
    command = [sys.executable, "-S", "-c", code]
    return attempt(
        command, tmp_path / "one.log", environment={}, grace_s=5, limit_s=limit_s, stop=stop or threading.Event(),
        on_stage=lambda _: None, queues=True,
    )  # fmt: skip


def test_what_waits_is_not_ended(tmp_path: Path) -> None:
    """It may run for no time at all, and ends by itself."""
    ended = tried(tmp_path, 'import time\ntime.sleep(0.3)\nprint(\'{"verdict": "PASS"}\')', limit_s=0.0)
    assert (ended.cut_short, ended.verdict) == (False, "PASS")


def test_what_runs_is_ended(tmp_path: Path) -> None:
    ended = tried(tmp_path, _ENDS, limit_s=0.0)
    assert ended.cut_short
    assert "refresh.max_hours" in ended.error


def test_what_was_stopped_while_it_waited_ran_for_no_time(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    ended = tried(tmp_path, "import time\ntime.sleep(60)", limit_s=None, stop=stop)
    assert (ended.cut_short, ended.seconds) == (True, 0.0)


class Cluster:
    """Ray writes into the log of a job that it has no room for yet."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def begin(self, of: Task, mark: Mark) -> None:
        self.words.insert(0, "PENDING")

    def under_way(self, key: str) -> tuple[str, ...]:
        return ()

    def lines(self, identifier: str) -> Iterator[str]:
        yield from ("Runtime env is setting up.\n", "[1/2] source: started\n", "[2/2] quantize: started\n")

    def now(self, identifier: str) -> Now:
        word = self.words.pop(0)
        return Now(word, word == "SUCCEEDED", 0 if word == "SUCCEEDED" else None)

    def cancel(self, identifier: str) -> None:
        raise AssertionError


@pytest.mark.parametrize("words", [["RUNNING", "SUCCEEDED"], ["PENDING", "RUNNING", "SUCCEEDED"]])
def test_the_log_says_when_a_job_runs_and_not_before(tmp_path: Path, words: list[str]) -> None:
    shown: list[str] = []
    cluster = Cluster(*words)
    run_attached(cluster, task("tiny-ptpc-fp8kv"), "k", store=tmp_path, show=shown.append, pause_s=0.0)
    told = [line.split(" ", 1)[1] if "room" in line else line for line in shown[1:]]
    assert told[0] == "Runtime env is setting up.\n"
    assert told[len(words) - 1] == "has found room\n"
    assert sum("room" in line for line in shown) == 1
