"""The scheduler as a process: two of them, signals, and what those who watch it see."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import cli
from pipeline.errors import UserError
from pipeline.schedule.fires import Fires, read_fires, write_fires
from tests.fleet.staged import Stage, alive
from tests.processes import processes_naming

ROOT = Path(__file__).parents[2]
YEARLY = 'refresh: {{schedule: "0 0 1 {month} *", missed: {missed}}}'


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
def scheduler(stage: Stage, *arguments: str, **environ: str) -> Iterator[Scheduler]:
    argv = [sys.executable, "-m", "tests.schedule.staged_scheduler", str(stage.folder), *arguments]
    environment = {**os.environ, **environ}
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Scheduler(process)
        finally:
            process.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    yield Stage(tmp_path)
    assert processes_naming(str(tmp_path)) == ()


def recipe(stage: Stage, name: str, *plan: str, missed: str = "run") -> None:
    """A recipe whose time passed a day ago, when no scheduler ran."""
    now = datetime.now(UTC)
    stage.recipe(name, *plan)
    path = stage.folder / "recipes" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"name: {name}\nextends: tiny-ptpc-fp8kv\n{YEARLY.format(month=now.month, missed=missed)}\n", encoding="utf-8"
    )
    write_fires(stage.store, Fires(name, since=now - timedelta(days=400)))


def pids(stage: Stage, name: str) -> list[int]:
    return [int(pid) for pid in (stage.children / f"{name}.pids").read_text().split()]


def test_of_two_one_works_and_when_it_is_killed_the_other_takes_over(stage: Stage) -> None:
    recipe(stage, "a", "hang", "pass")
    with scheduler(stage, "a") as first:
        first.hears("missed", recipe="a", run=True)
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
    fires = read_fires(stage.store, "a")
    assert fires is not None
    assert not fires.unsettled


def test_what_a_signal_cut_short_goes_on_and_those_who_watch_are_told(stage: Stage) -> None:
    recipe(stage, "a", "hang", "pass", missed="skip")
    write_fires(
        stage.store, Fires("a", since=datetime.now(UTC) - timedelta(days=1), fired=datetime.now(UTC), settled=None)
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(stage.folder / "notify"))
        systemd.settimeout(30)
        with scheduler(stage, "a", NOTIFY_SOCKET=str(stage.folder / "notify")) as first:
            port = first.hears("metrics")["port"]
            first.hears("resumed", recipe="a")
            first.hears("stage", recipe="a")
            said = {systemd.recv(1000).decode() for _ in range(2)}
            assert "READY=1" in said
            assert [word for word in said if word.startswith("STATUS=next: a at ")]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                shown = answer.read().decode()
            assert "quantmint_running 1.0\n" in shown
            assert 'quantmint_next_fire_timestamp_seconds{recipe="a"}' in shown
            other = (stage.folder / "recipes/a.yaml").read_text().replace("name: a", "name: b")
            (stage.folder / "recipes/b.yaml").write_text(other, encoding="utf-8")
            first.process.send_signal(signal.SIGHUP)
            first.hears("next", recipes=["a", "b"])
            assert first.ends(signal.SIGTERM) == 0
            while systemd.recv(1000) != b"STOPPING=1":
                pass
    assert not any(alive(pid) for pid in pids(stage, "a"))
    assert stage.locks() == []
    with scheduler(stage, "--once", "a") as second:
        second.hears("resumed", recipe="a")
        assert second.hears("finished", recipe="a")["verdict"] == "PASS"
        assert second.process.wait(30) == 0
    fires = read_fires(stage.store, "a")
    assert fires is not None
    assert not fires.unsettled


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
    monkeypatch.delenv("QUANTMINT_WEBHOOK")
    assert run("--once-missed", "--metrics-file", "quantmint.prom") == 0
    assert "quantmint_queue_length 0.0" in (tmp_path / "quantmint.prom").read_text()
