"""Processes that are killed, and processes that meet."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.stages.stage import Job

Forked = Callable[[Callable[[], None]], int]
CodeOf = Callable[[int], int]
KEYS = ("a", "b", "c", "d")


def wait_for(path: Path) -> None:
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never appeared")


@pytest.mark.parametrize("fatal", KEYS)
def test_killed_inside_a_stage(
    orchestra: Any, forked: Forked, code_of: CodeOf, die: Callable[[], None], fatal: str
) -> None:
    def stages(deadly: bool) -> list[Any]:
        def work(job: Job) -> None:
            if deadly:
                (job.path / "piece").write_text("whole")
                die()
            assert (job.path / "piece").read_text() == "whole"

        return [
            orchestra.stage(key, *KEYS[max(0, n - 1) : n], **({"work": work} if key == fatal else {}))
            for n, key in enumerate(KEYS)
        ]

    assert code_of(forked(lambda: orchestra.run(*stages(True)))) == -signal.SIGKILL
    before = KEYS[: KEYS.index(fatal)]
    assert orchestra.committed(*stages(False)) == list(before)
    assert orchestra.last_run.finished is None

    outcome = orchestra.run(*stages(False))
    assert [step.planned.key for step in outcome.steps if step.cached] == list(before)
    assert Counter(orchestra.ran) == Counter(KEYS) + Counter([fatal])
    assert orchestra.last_run.exit_code == 0
    leftovers = [path.name for path in orchestra.setting.store.root.rglob("*") if path.suffix in {".work", ".lock"}]
    assert leftovers == []


def test_the_second_waits_says_so_and_takes_the_result(
    orchestra: Any, forked: Forked, code_of: CodeOf, tmp_path: Path
) -> None:
    began, told = tmp_path / "began", tmp_path / "told"

    def slow(job: Job) -> None:
        began.touch()
        wait_for(told)

    first = forked(lambda: orchestra.run(orchestra.stage("only", work=slow)))
    wait_for(began)
    lines: list[str] = orchestra.lines

    class Loud(list[str]):
        def append(self, text: str) -> None:
            lines.append(text)
            if "waiting for" in text:
                told.touch()

    orchestra.lines = Loud()
    outcome = orchestra.run(orchestra.stage("only"))
    assert code_of(first) == 0
    assert outcome.steps[0].cached
    assert orchestra.ran == ["only"]
    assert [line for line in lines if line.startswith("    waiting for ")]
