"""A job that is followed to its end, whatever its place does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from pipeline.errors import StageError, UserError
from pipeline.submit.following import beyond, followed
from pipeline.submit.place import State
from tests.submit.test_command import ended

AWAY = StageError("the place is away", transient=True)
LOG = "first\nsecond\nthird\n"


class Job:
    """Each look at it is the next of ``looks``; its log breaks off after as many characters as ``logs`` says."""

    def __init__(self, looks: list[State | Exception], logs: list[int] | None = None) -> None:
        self.looks, self.logs, self.text = looks, logs or [], ""

    def lines(self, _: str, __: object = None) -> Iterator[str]:
        end = self.logs.pop(0) if self.logs else len(LOG)
        for begin, until in pairwise([*range(0, end, 4), end]):
            yield LOG[begin:until]

    def state(self, _: str) -> State:
        look = self.looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    def followed(self, **given: float) -> State:
        def show(piece: str) -> None:
            self.text += piece

        return followed("4711", self.lines, self.state, show, **{"pause_s": 0.0, **given})


def test_a_log_that_ends_early_is_not_the_jobs_end() -> None:
    job = Job([State("RUNNING"), State("RUNNING"), State("FAILED", 1)], [8, 3])
    assert job.followed() == State("FAILED", 1)
    assert job.text == LOG


def test_a_place_that_is_away_for_a_while_is_asked_again() -> None:
    job = Job([AWAY, AWAY, State("COMPLETED", 0)], [8])
    assert job.followed().exit_code == 0
    assert job.text == LOG
    with pytest.raises(StageError, match="the place is away"):
        Job([AWAY]).followed(patience_s=-1.0)
    with pytest.raises(StageError, match="for good"):
        Job([StageError("for good")]).followed()


def test_a_job_that_its_place_forgot_is_no_wrong_command() -> None:
    with pytest.raises(StageError, match="does not know it any more: no such job") as failure:
        Job([UserError("no such job", hint="Its log is a.out.")]).followed()
    assert (failure.value.exit_code, failure.value.hint) == (5, "Its log is a.out.")


def test_what_lies_beyond() -> None:
    assert list(beyond(5, ["abc", "def", "gh"])) == ["", "f", "gh"]
    assert "".join(beyond(0, ["abc", "d"])) == "abcd"


def test_a_node_that_went_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The dashboard closes the log in peace where the node that it came from is gone."""
    job = Job([State("RUNNING"), State("RUNNING"), State("FAILED", 5)])
    monkeypatch.setattr("pipeline.submit.ray.RayJobs", lambda *_: job)
    monkeypatch.setattr("pipeline.submit.following._PAUSE_S", 0.0)
    assert ended("--ray", "head:8265", "--status", "job", "--follow") == 5
    assert capsys.readouterr().out == LOG
