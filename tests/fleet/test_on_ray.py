"""Recipes as jobs of a Ray cluster: what a fleet submits, and how a submitted run is followed like a child."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.cluster.address import jobs_address_of
from pipeline.errors import StageError, UserError
from pipeline.fleet.devices import Device, Devices
from pipeline.submit.attached import Mark, Now, key_of, run_attached
from pipeline.submit.ray import Options as Place
from pipeline.submit.ray import description, stepwise
from pipeline.submit.task import Task
from tests.fleet.staged import CHILD, Stage, by_name
from tests.submit.cases import task

RUNNING, DONE = Now("RUNNING", False), Now("SUCCEEDED", True, 0)
UNPLACED = Now("FAILED", True, unplaced=True)
Step = Callable[["Cluster", str], None]


@dataclass
class Cluster:
    """A cluster of which each job goes through ``steps``, one for each time that its log is read to its end."""

    steps: list[Now | Exception | Step]
    says: str = '{"verdict": "PASS"}\n'
    log: str = "[1/2] source: started\n[2/2] gate: started\n"
    marks: dict[str, Mark] = field(default_factory=dict)
    states: dict[str, Now] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def begin(self, task: Task, mark: Mark) -> None:
        assert mark.answer.read_text() == "", "without it, the job does nothing"
        self.marks[mark.identifier], self.states[mark.identifier] = mark, RUNNING

    def under_way(self, key: str) -> tuple[str, ...]:
        return tuple(name for name, mark in self.marks.items() if mark.key == key and not self.states[name].ended)

    def lines(self, identifier: str) -> Iterator[str]:
        step = self.steps.pop(0)
        yield self.log[:30]
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Now):
            self.states[identifier] = step
        else:
            step(self, identifier)
        yield self.log[30:]
        if self.states[identifier].exit_code is not None:
            self.marks[identifier].answer.write_text(self.says)

    def now(self, identifier: str) -> Now:
        return self.states[identifier]

    def cancel(self, identifier: str) -> None:
        self.cancelled.append(identifier)
        self.states[identifier] = Now("STOPPED", True)


@dataclass
class Shown:
    """What a run on a cluster was, and what it showed."""

    store: Path
    text: str = ""

    def run(self, cluster: Cluster, key: str = "k", **given: float) -> tuple[int, str]:
        def show(piece: str) -> None:
            self.text += piece

        of = task("tiny-ptpc-fp8kv")
        return run_attached(cluster, of, key, store=self.store, show=show, **{"pause_s": 0.0, **given})

    @property
    def answers(self) -> list[Path]:
        return list(self.store.rglob("*.answer"))


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path / "store")


def test_its_own_words_and_its_own_code(shown: Shown) -> None:
    cluster = Cluster([Now("FAILED", True, 3)], says='{"verdict": "INCONCLUSIVE"}\n')
    assert shown.run(cluster) == (3, '{"verdict": "INCONCLUSIVE"}\n')
    (name,) = cluster.marks
    assert shown.text == f"{name} was submitted\n{name} has found room\n{cluster.log}"
    assert shown.answers == []


def test_a_log_that_breaks_off_is_shown_once(shown: Shown) -> None:
    away = StageError("no Ray dashboard answers", transient=True)
    cluster = Cluster([away, RUNNING, away, DONE])
    assert shown.run(cluster)[0] == 0
    assert shown.text.count("[1/2]") == shown.text.count("[2/2]") == 1
    assert len(cluster.marks) == 1


def test_what_found_no_room_is_asked_for_again(shown: Shown) -> None:
    cluster = Cluster([UNPLACED, UNPLACED, DONE])
    assert shown.run(cluster) == (0, cluster.says)
    assert len(cluster.marks) == 3
    assert shown.answers == []


def test_a_cluster_that_stays_away_leaves_the_job_to_whoever_comes_next(shown: Shown) -> None:
    cluster = Cluster([StageError("no Ray dashboard answers", transient=True), DONE])
    with pytest.raises(StageError, match="no Ray dashboard") as failure:
        shown.run(cluster, patience_s=-1.0)
    assert failure.value.transient
    assert shown.run(cluster, key="another") == (0, cluster.says), "another run is another job"
    assert len(cluster.marks) == 2
    cluster.steps.append(DONE)
    assert shown.run(cluster) == (0, cluster.says)
    assert len(cluster.marks) == 2
    assert "runs there already, and is followed" in shown.text


@pytest.mark.parametrize(
    ("end", "message", "transient"),
    [
        (Now("FAILED", True, lost=True, message="its node died"), "its node died", True),
        (Now("FAILED", True, message="no such environment"), "no such environment", False),
        (Now("STOPPED", True), "was stopped at the cluster", False),
        (UserError("Ray refused: no such job"), "does not know it any more", True),
    ],
)
def test_a_job_without_an_end_of_its_own(shown: Shown, end: Now | Exception, message: str, transient: bool) -> None:
    with pytest.raises(StageError, match=message) as failure:
        shown.run(Cluster([end]))
    assert failure.value.transient is transient


def test_told_to_stop_it_stops_the_job(shown: Shown) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster([lambda _, __: os.kill(os.getpid(), signal.SIGTERM)])
    assert shown.run(cluster) == (143, "")
    assert cluster.cancelled == list(cluster.marks)
    assert shown.answers == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_told_to_stop_while_it_submits(shown: Shown) -> None:
    class Slow(Cluster):
        def begin(self, task: Task, mark: Mark) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().begin(task, mark)

    cluster = Slow([])
    assert shown.run(cluster) == (143, "")
    assert cluster.cancelled == list(cluster.marks)
    assert len(cluster.marks) == 1


def test_a_job_that_was_given_up_is_not_followed(shown: Shown) -> None:
    """Ray has not begun it yet, and would end it as soon as it does."""

    class Queued(Cluster):
        def cancel(self, identifier: str) -> None:
            self.states[identifier] = Now("PENDING", False)

    cluster = Queued([lambda _, __: os.kill(os.getpid(), signal.SIGTERM), DONE])
    assert shown.run(cluster)[0] == 143
    assert shown.run(cluster) == (0, cluster.says)
    assert len(cluster.marks) == 2


def test_a_log_that_a_signal_interrupts_is_closed(shown: Shown) -> None:
    closed = []

    async def pieces() -> AsyncIterator[str]:
        try:
            yield "submitted"
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            closed.append("the connection")

    class Tailed(Cluster):
        def lines(self, identifier: str) -> Iterator[str]:
            return stepwise(pieces())

    assert shown.run(Tailed([])) == (143, "")
    assert closed == ["the connection"]


def test_what_is_sent() -> None:
    mark, place = Mark("quantmint-x-1", "k", Path("/a b/x.answer")), Place(folder=Path("/work"), venv="/env")
    sent = description(task("llama405b-fp8kv", gpus=8, nodes=1), place, mark)
    assert sent["entrypoint_num_gpus"] == 8
    assert "entrypoint_num_cpus" not in sent
    assert sent["submission_id"] == "quantmint-x-1"
    assert sent["entrypoint"].startswith("test -e '/a b/x.answer' && cd /work || exit 5; exec /env/bin/quantmint run ")
    assert sent["entrypoint"].endswith(" > '/a b/x.answer'")
    small = description(task("tiny-ptpc-fp8kv"), place, mark)
    assert "entrypoint_num_gpus" not in small
    assert small["entrypoint_num_cpus"] == 1, "else Ray begins it on its head, however much goes on there"
    keys = {key_of(task("tiny-ptpc-fp8kv", **more), ("quantmint",), Path("/work"), text) for more, text in KEYS}
    assert len(keys) == len(KEYS)


KEYS = [({}, "a"), ({}, "b"), ({"arguments": ("--redo", "gate")}, "a"), ({"nodes": 2}, "a")]


def test_all_at_once_and_no_device_of_ours(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Devices("HIP_VISIBLE_DEVICES", (Device(0, "0"),))
    monkeypatch.setattr("pipeline.fleet.round.devices_of", lambda *_: ours)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    names = [stage.recipe(f"r{number}", gpus=8) for number in range(4)]
    child = (sys.executable, "-I", "-S", str(CHILD), str(stage.children))
    summary = stage.run(*names, on="http://head:8265", submit_command=child)
    assert {name: one.verdict for name, one in by_name(summary).items()} == dict.fromkeys(names, "PASS")
    first = next(event for event in stage.events if event.kind == "started")
    assert (first.running, first.queued) == (4, 0)
    assert [stage.seen(name)[0]["devices"][0] for name in names] == ["0"] * 4, "of this machine, and unshared"
    assert not (stage.store / "refresh" / "devices").exists()
    assert stage.locks() == []


def test_the_command_of_a_child(stage: Stage) -> None:
    options = stage.options(on="auto", submit_command=("quantmint", "submit"), remote="s3://b/c", device="cpu")
    words = options.command_line("a", ["gate"])
    own = ["--device", "cpu", "--remote-store", "s3://b/c", "--redo", "gate"]
    told = ["--ray", "auto", "--attached", "--json", "--store", str(stage.store)]
    assert words == ["quantmint", "submit", "a", *told, "--", *own]
    assert (options.slots(0), stage.options(on="auto", jobs=2).slots(0)) == (sys.maxsize, 2)
    assert (stage.options().slots(3), stage.options().slots(0)) == (3, 1)


def test_where_jobs_go() -> None:
    assert jobs_address_of("ray", {}) == "auto"
    assert jobs_address_of("ray", {"RAY_ADDRESS": "head:6379"}) == "auto", "which Ray's client resolves"
    assert jobs_address_of("http://head:8265", {"RAY_ADDRESS": "other:6379"}) == "http://head:8265"
    for on, given in [("ray://head", {}), ("ray", {"RAY_ADDRESS": "ray://head:10001"})]:
        with pytest.raises(UserError, match="jobs go to the dashboard") as failure:
            jobs_address_of(on, given)
        assert "http://HEAD:8265" in str(failure.value)
    for wrong in ("head:8265", "http://", "http://a:b@head:8265", "http://head:x", "slurm"):
        with pytest.raises(UserError, match="expected ray "):
            jobs_address_of(wrong, {})
