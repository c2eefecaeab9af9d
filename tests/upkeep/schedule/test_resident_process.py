"""The scheduler as a process: two of them, signals, and what those who watch it see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.commands.cli import cli
from tests.processes import processes_naming
from tests.upkeep.fleet.staged import Stage, alive

ROOT = Path(__file__).parents[3]


@dataclass
class Scheduler:
    process: subprocess.Popen[str]

    def hears(self, event: str, **facts: object) -> dict[str, Any]:
        """The next line that says so."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == event and facts.items() <= told.items():
                return told
            seen.append(line)
        raise AssertionError(f"it ended with {self.process.wait()} after {seen}")

    def ends(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def scheduler(stage: Stage, *recipes: str) -> Iterator[Scheduler]:
    argv = [sys.executable, "-m", "tests.upkeep.schedule.staged_scheduler", str(stage.folder), *recipes]
    with subprocess.Popen(argv, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Scheduler(process)
        finally:
            process.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    yield Stage(tmp_path)
    assert processes_naming(str(tmp_path)) == ()


def recipe(stage: Stage, name: str, *plan: str) -> None:
    """A recipe that is due, with a schedule that does not come during a test."""
    stage.recipe(name, *plan)
    path = stage.folder / "recipes" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"name: {name}\nextends: tiny-ptpc-fp8kv\nrefresh: {{schedule: 0 0 29 2 *}}\n", encoding="utf-8")


def pids(stage: Stage, name: str) -> list[int]:
    return [int(pid) for pid in (stage.children / f"{name}.pids").read_text().split()]


def test_of_two_one_works_and_when_it_is_killed_the_other_takes_over(stage: Stage) -> None:
    recipe(stage, "a", "hang", "pass")
    with scheduler(stage, "a") as first:
        first.hears("fired", recipe="a")
        first.hears("stage", recipe="a")
        with scheduler(stage, "a") as second:
            second.hears("waiting", recipe="a")
            first.process.kill()
            second.hears("started", recipe="a")
            ended = second.hears("finished", recipe="a")
            assert (ended["state"], ended["verdict"]) == ("ran", "PASS")
            assert len(stage.seen("a")) == 2
            assert not any(alive(pid) for pid in pids(stage, "a"))
            assert second.ends(signal.SIGINT) == 130
    assert stage.locks() == []


@pytest.mark.slow
def test_what_a_signal_cut_short_goes_on_and_those_who_watch_are_told(stage: Stage) -> None:
    recipe(stage, "a", "hang", "pass")
    with scheduler(stage, "a") as first:
        first.hears("stage", recipe="a")
        metrics = stage.folder / "quantmint.prom"  # written after the line
        while not metrics.exists() or "quantmint_running 1.0\n" not in metrics.read_text():
            assert first.process.poll() is None
            time.sleep(0.05)
        assert list(json.loads((stage.folder / "planned.json").read_text())) == ["a"]
        assert first.ends(signal.SIGTERM) == 0
    assert not any(alive(pid) for pid in pids(stage, "a"))
    assert stage.locks() == []
    with scheduler(stage, "a") as second:
        assert second.hears("finished", recipe="a")["verdict"] == "PASS"
        assert second.ends(signal.SIGTERM) == 0


def test_the_command_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/a.yaml").write_text("name: a\nextends: tiny-ptpc-fp8kv\n", encoding="utf-8")

    def run(*arguments: str) -> Any:
        return cli.main(["schedule", "run", *arguments], prog_name="quantmint", standalone_mode=False)

    with pytest.raises(UserError, match="none of the recipes"):
        run("a")
    assert "a: it has no schedule" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"end in \.prom"):
        run("--metrics-file", "metrics")
    monkeypatch.setenv("QUANTMINT_WEBHOOK", "nonsense-s3cr3t")
    with pytest.raises(UserError) as refused:
        run()
    assert "s3cr3t" not in str(refused.value)
