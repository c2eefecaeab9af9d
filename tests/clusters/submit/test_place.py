"""A job that is followed to its end, whatever its place does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.clusters.submit import job as jobs
from quantmint.pipeline.clusters.submit.job import JobState, Scheduler, follow

AWAY = StageError("the place is away", transient=True)


class Job:
    """Each look at it is the next of ``looks``, and a line of its log comes with each."""

    def __init__(self, *looks: JobState | Exception) -> None:
        self.looks, self.text, self.lines = list(looks), "", 0

    def state(self, _: str) -> JobState:
        look = self.looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    def show_log(self, _: str, show: Callable[[str], None]) -> None:
        self.lines += 1
        show(f"{self.lines}\n")

    def followed(self) -> JobState:
        def show(piece: str) -> None:
            self.text += piece

        return follow(cast(Scheduler, self), "4711", show, lambda _: None)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)


def test_it_is_followed_through_absences_to_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(JobState("RUNNING"), AWAY, JobState("RUNNING"), AWAY, JobState("FAILED", 1))
    assert job.followed() == JobState("FAILED", 1)
    assert job.text == "1\n2\n3\n"
    monkeypatch.setattr(jobs, "_OUTAGE_S", -1.0)
    with pytest.raises(StageError, match="the place is away"):
        Job(AWAY).followed()


def test_what_does_not_pass_ends_it() -> None:
    with pytest.raises(StageError, match="for good"):
        Job(StageError("for good")).followed()
    with pytest.raises(StageError, match="no longer knows this job: no such job") as failure:
        Job(UserError("no such job", hint="Its log is a.out.")).followed()
    assert (failure.value.exit_code, failure.value.hint, failure.value.transient) == (5, "Its log is a.out.", True)
