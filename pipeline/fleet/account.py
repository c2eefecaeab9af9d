"""What a round has to tell: events while it goes on, a summary at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any

from pipeline.errors import QuantmintError
from pipeline.fleet.budgets import Budgets
from pipeline.fleet.events import Event, Kind, now_utc
from pipeline.fleet.job import Job
from pipeline.fleet.quoting import without_secrets
from pipeline.fleet.requests import Options
from pipeline.fleet.summary import Ended, Summary, write_round


class Account:
    """Of one round, which begins now. ``waiting`` and ``running`` are counted for each event."""

    def __init__(
        self,
        options: Options,
        *,
        on_event: Callable[[Event], None],
        warn: Callable[[str], None],
        waiting: Sized,
        running: Sized,
    ) -> None:
        self._store = options.store
        self._on_event = on_event
        self._warn_aloud = warn
        self._waiting, self._running = waiting, running
        self._started = now_utc()
        self._warnings: list[str] = []
        self.ended: list[Ended] = []
        seconds = None if options.max_hours is None else options.max_hours * 3600
        self.budgets = Budgets(seconds, options.max_disk, began=time.monotonic())
        self.budgets.watch([options.store])

    def warn(self, message: str) -> None:
        """Something went wrong that stops nothing."""
        message = without_secrets(message, os.environ)  # of a proxy, a bucket or the Hub, in whatever words
        self._warnings.append(message)
        self._warn_aloud(message)

    def tell(self, kind: Kind, job: Job, **facts: Any) -> None:
        """Something happened to a job; ``facts`` are fields of the event."""
        self._send(
            kind=kind,
            recipe=job.name,
            trigger=job.request.trigger,
            attempt=job.attempts,
            **{"reason": job.due.reason, **facts},
        )

    def end(self, ended: Ended) -> None:
        """A recipe left the round."""
        ended = replace(ended, reason=without_secrets(ended.reason, os.environ))
        self.ended.append(ended)
        self._send(
            kind="held" if ended.state == "held" else "finished",
            recipe=ended.recipe,
            trigger=ended.trigger,
            attempt=ended.attempts,
            state=ended.state,
            verdict=ended.verdict,
            exit_code=ended.exit_code,
            duration_s=ended.duration_s,
            tag=ended.tag,
            places=ended.places,
            causes=ended.causes,
            reason=ended.reason,
            log=ended.log,
        )

    def close(self, stopped_by: int | None) -> Summary:
        """The round is over: its summary, which is also written to the store."""
        summary = Summary(
            started=self._started,
            finished=now_utc(),
            ended=tuple(self.ended),
            grown_bytes=self.budgets.grown_bytes(),
            stopped_by=stopped_by,
            warnings=tuple(self._warnings),
        )
        try:
            write_round(self._store, summary)
        except QuantmintError as error:
            self.warn(f"the round's summary could not be kept: {error.message}")
            summary = replace(summary, warnings=tuple(self._warnings))
        return summary

    def _send(self, **facts: Any) -> None:
        self._on_event(Event(at=now_utc(), queued=len(self._waiting), running=len(self._running), **facts))
