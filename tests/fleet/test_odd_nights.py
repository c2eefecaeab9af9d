"""What hardly ever happens, and then at night: late requests, odd bytes, disks that stutter, machines that slept."""

from __future__ import annotations

import errno
import io
import json
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.fleet.attempt import _tell_stage
from pipeline.fleet.devices import free_of, give_back
from pipeline.fleet.display import shown
from pipeline.fleet.events import Event
from pipeline.fleet.requests import Request
from pipeline.fleet.summary import Summary
from pipeline.locks import Lock
from pipeline.refresh.due import Due
from pipeline.store.runs import RunLog, list_runs
from tests.fleet.staged import Stage, by_name

HALF = "caf\udce9.yaml"
"""A file's name in Latin-1, as Python hands it out where names are UTF-8."""


def test_what_is_asked_for_after_the_order_to_stop_holds_up_no_end(stage: Stage) -> None:
    """A schedule's time that comes while children are given their grace."""
    stage.recipe("a")
    fleet = stage.fleet()
    fleet.stop(signal.SIGTERM)
    fleet.add([Request("a", "schedule")])
    found: list[Summary] = []
    thread = threading.Thread(target=lambda: found.append(fleet.run()), daemon=True)
    thread.start()
    thread.join(20)
    assert [ended.state for ended in found[0].ended] == ["interrupted"]
    assert (found[0].exit_code, stage.looks) == (143, [])


def test_a_name_that_is_no_unicode_ends_only_its_own_recipe(stage: Stage) -> None:
    stage.recipe("a", f"broken {HALF} cannot be read")
    stage.recipe("b")
    stage.broken(HALF)
    summary = stage.run("a", "b", HALF, jobs=1)
    assert [by_name(summary)[name].exit_code for name in ("a", "b", HALF)] == [5, 0, 2]
    assert stage.state("a").reason == "caf?.yaml cannot be read"
    (kept,) = (stage.store / "refresh" / "rounds").iterdir()
    assert HALF in {ended["recipe"] for ended in json.loads(kept.read_bytes())["ended"]}


def test_a_run_that_ends_at_such_a_name_says_so(tmp_path: Path) -> None:
    RunLog.start(tmp_path, "a", "0" * 64, []).finish(None, 5, facts={"error": f"{HALF} cannot be read"})
    assert [run.facts["error"] for run in list_runs(tmp_path)] == [f"{HALF} cannot be read"]


def test_what_is_interrupted_with_new_inputs_does_not_rest_for_what_failed_with_the_old(stage: Stage) -> None:
    stage.recipe("a", "hang", "pass")
    failed, rests = (f"{datetime.now(UTC) + timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}" for hours in (-1, 12))
    stage.remember("a", attempts_failed=3, inputs="old", last_attempt=failed, not_before=rests, last_exit=5)

    def hear(event: Event) -> None:
        if event.kind == "stage":
            fleet.stop(signal.SIGTERM)

    fleet = stage.fleet(hear)
    fleet.add([Request("a")])
    assert by_name(fleet.run())["a"].state == "interrupted"
    assert by_name(stage.run())["a"].verdict == "PASS"


def test_a_store_that_cannot_be_read_for_a_moment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.fleet.devices.is_held", away)
        assert free_of(stage.store, (0, 1), {}) == ()
    assert free_of(stage.store, (0, 1), {}) == (0, 1)


def test_a_device_that_cannot_be_given_back_ends_no_round(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[bool] = []

    def once(locks: Iterable[Lock]) -> None:
        give_back(locks)
        if not refused:
            refused.append(True)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pipeline.fleet.round.give_back", once)
    stage.recipe("a", "transient", "pass")
    stage.recipe("b")
    assert [ended.verdict for ended in stage.run(jobs=1).ended] == ["PASS", "PASS"]
    assert refused
    assert "Input/output error" in stage.warnings[0]


def test_a_lock_that_was_lost_between_two_attempts_is_taken_anew(stage: Stage) -> None:
    """A machine that slept: another one has the recipe now, and is not worked beside."""
    stage.recipe("a", "transient", "pass")
    other = Lock(stage.store / "refresh" / "a.lock")
    held: list[int] = []

    def hear(event: Event) -> None:
        if event.kind == "retrying":
            job = fleet._waiting["a"]
            assert job.lock is not None
            job.lock.release()
            assert other.acquire(timeout=0)
            with pytest.raises(Exception, match="taken over"):
                Lock.check(job.lock)
        elif event.kind == "waiting":
            held.append(len(stage.seen("a")))
            other.release()

    fleet = stage.fleet(hear)
    fleet.add([Request("a")])
    fleet.close()
    assert by_name(fleet.run())["a"].verdict == "PASS"
    assert held == [1]
    assert stage.locks() == []


def test_a_fault_of_the_look_tells_no_secret(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-for-a-webhook")

    def look(_: Sequence[str]) -> tuple[Due, ...]:
        raise RuntimeError("https://me:pw@proxy refused\nAuthorization: Bearer not-for-a-webhook")

    fleet = stage.fleet(look=look)
    fleet.add([Request("a")])
    fleet.close()
    (ended,) = fleet.run().ended
    assert ended.reason == "RuntimeError: https://proxy refused Authorization: Bearer [secret]"


def test_what_could_not_be_asked_is_not_said_to_be_current(stage: Stage) -> None:
    stage.recipe("a")
    answer = "org/base: cannot resolve main to a commit"
    stage.states["a"] = Due("a", "a", "unknown", answer, unknown=(answer,))
    summary = stage.run()
    (ended,) = summary.ended
    assert (ended.state, ended.exit_code, ended.reason, ended.attempts) == ("unknown", 0, answer, 0)
    assert summary.exit_code == 0
    assert [event.state for event in stage.events if event.kind == "finished"] == ["unknown"]


def test_what_a_place_answers_tells_no_secret(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-for-a-webhook")
    stage.recipe("a")
    answer = "the proxy: no not-for-a-webhook here"
    stage.states["a"] = Due("a", "a", "broken", answer, unknown=(answer,))
    summary = stage.run()
    assert "not-for-a-webhook" not in json.dumps(summary.to_json())
    assert stage.warnings == ["the proxy: no [secret] here"]


def test_two_files_with_one_name_are_not_taken_for_one(stage: Stage) -> None:
    """What both publish would go over the other's, and which one ran would be a matter of order."""
    stage.recipe("a")
    ours = stage.recipes["a"]
    stage.recipes["other/a.yaml"] = replace(ours, path=ours.path.with_name("other.yaml"))

    def look(recipes: Sequence[str]) -> tuple[Due, ...]:
        return tuple(replace(stage.look(["a"])[0], loaded=stage.recipes[recipe]) for recipe in recipes)

    fleet = stage.fleet(look=look)
    fleet.add([Request("a"), Request("other/a.yaml")])
    fleet.close()
    found = {name: (ended.state, ended.exit_code) for name, ended in by_name(fleet.run()).items()}
    assert found == {"a": ("ran", 0), "other/a.yaml": ("broken", 2)}
    assert len(stage.seen("a")) == 1


def test_a_log_without_ends_of_lines_is_not_read_again_and_again(tmp_path: Path) -> None:
    log, told = tmp_path / "a.log", list[str]()
    with log.open("wb") as stream:
        stream.write(b"\r 50%|#####     |" * 100_000 + b"\n[2/3] eval")
        stream.flush()
        seen = _tell_stage(log, 0, told.append)
        stream.write(b"uate: started\n" + b"\r 60%|######    |" * 100_000)
        stream.flush()
        seen = _tell_stage(log, seen, told.append)
        assert log.stat().st_size - seen > 4096, "what follows an end of line is looked at once more"
        seen = _tell_stage(log, seen, told.append)
        stream.write(b"\n[3/3] gate: started\n")
        stream.flush()
        assert log.stat().st_size - seen < 8192
        assert _tell_stage(log, seen, told.append) == log.stat().st_size
    assert told == ["2/3 evaluate", "3/3 gate"]


def test_a_display_that_cannot_write_ends_no_round() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with shown(lines=True, stream=Full()) as (show, warn):
        show(Event(kind="started", recipe="a", at="2026-11-21T18:00:00Z", trigger="asked", queued=0, running=1))
        warn("the disk is full")
