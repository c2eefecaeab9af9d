"""`quantmint schedule run`: a fleet, a resident scheduler and what they tell, until a signal ends them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from pipeline.errors import UserError
from pipeline.fleet.events import Event
from pipeline.fleet.requests import Look, Options
from pipeline.fleet.round import Fleet
from pipeline.fleet.summary import Summary
from pipeline.notices.outlets import Outlets
from pipeline.schedule.journal import Journal
from pipeline.schedule.readiness import notify
from pipeline.schedule.reading import Recipes
from pipeline.schedule.resident import Resident


class Service:
    """One fleet for all recipes, in the thread that calls `run`, which must be the process's first."""

    def __init__(
        self, options: Options, recipes: Sequence[str], journal: Journal, told: Outlets, *, look: Look | None = None
    ) -> None:
        self._journal, self._told, self._named = journal, told, bool(recipes)
        self._recipes = Recipes(recipes)
        self._fleet = Fleet(options, on_event=self._hear, look=look, warn=journal.warn, on_round=self._ended)
        self._resident = Resident(
            options.store, self._recipes, add=self._fleet.add, journal=journal, planned=self._planned
        )
        self._stopped_by = 0

    def run(self, *, once: bool = False) -> int:
        """Stay until a signal comes, ``once`` until what was missed is done; the command's exit code.

        A service that is told to stop by SIGTERM has done what it should: 0. Raises `UserError` where no recipe has a
        schedule and none can get one.
        """
        with self._signals():
            if once:
                self._resident.catch_up()
                self._fleet.close()
            else:
                self._resident.start()
                if self._named and not self._resident.names:
                    self._resident.close()
                    raise UserError("none of the recipes that were named has a schedule that can be used")
                notify("READY=1")
            try:
                summary = self._fleet.run()
            finally:
                notify("STOPPING=1")
                self._resident.close()
        if self._stopped_by == signal.SIGTERM:
            return 0
        return 128 + self._stopped_by if self._stopped_by else summary.exit_code

    def _hear(self, event: Event) -> None:
        self._resident.hear(event)
        self._journal.hear(event)
        self._told.hear(event)

    def _ended(self, summary: Summary) -> None:
        done = ", ".join(f"{ended.recipe} {ended.verdict or ended.state}" for ended in summary.ended)
        self._journal.tell("round", f"nothing left to do: {done}", exit_code=summary.exit_code)

    def _planned(self, fires: Mapping[str, datetime]) -> None:
        self._told.plan({name: moment.timestamp() for name, moment in fires.items()})
        if fires:
            name, moment = min(fires.items(), key=lambda item: item[1])
            notify(f"STATUS=next: {name} at {moment.isoformat(timespec='minutes')}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stopped_by = number
            self._fleet.stop(number)

        def reread(number: int, frame: FrameType | None) -> None:
            self._resident.reread()

        handlers: dict[int, Any] = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reread}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
