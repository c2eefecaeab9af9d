"""A scheduler that stays: at the times of each recipe's schedule it asks one fleet to look whether the recipe is due.

::

    resident = Resident(store, recipes, add=fleet.add, journal=journal)
    resident.start()
    fleet.run()                 # its on_event calls resident.hear
    resident.close()

APScheduler waits for the times. Everything that follows is done by one thread, which takes what has happened from a
queue; it also wakes every half minute to see whether the clock was put elsewhere, the machine slept, or a recipe's file
changed.

Several may run on one store, with no leader. All of them ask their fleets for every time, and the recipe's lock
decides: who comes second looks again and finds nothing due, or the work of a scheduler that was killed. A time that
comes while its recipe is still queued or run belongs to that run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

from pipeline.errors import QuantmintError
from pipeline.fleet.events import Event
from pipeline.fleet.requests import Request
from pipeline.schedule.cron import LATE_S
from pipeline.schedule.fires import CORRECTION, Fires, read_fires, sweep, write_fires
from pipeline.schedule.journal import Journal, shown, span
from pipeline.schedule.reading import Plan, Recipes
from pipeline.schedule.trigger import CronTrigger

TRIGGER: Final = "schedule"
_TICK_S: Final = 30.0
_STEP: Final = timedelta(minutes=1)  # of the clock, which is worth telling

_Kind = Literal["fire", "missed", "settled", "tick", "reread", "fault", "close"]


class Resident:
    """``add`` gives requests to a fleet, and returns at once. ``planned`` hears when each recipe comes next (UTC).

    ``clock`` is the time of day, aware; ``steady`` counts seconds that no setting of a clock changes.
    """

    def __init__(
        self,
        store: Path,
        recipes: Recipes,
        *,
        add: Callable[[Iterable[Request]], None],
        journal: Journal,
        planned: Callable[[Mapping[str, datetime]], None] = lambda fires: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        steady: Callable[[], float] = time.monotonic,
        tick_s: float = _TICK_S,
    ) -> None:
        self._store, self._recipes, self._add, self._journal = store, recipes, add, journal
        self._planned, self._clock, self._steady, self._tick_s = planned, clock, steady, tick_s
        self._plans: dict[str, Plan] = {}
        self._fires: dict[str, Fires] = {}
        self._faults: Mapping[str, str] = {}
        self._inbox: queue.SimpleQueue[tuple[_Kind, str, datetime | None]] = queue.SimpleQueue()
        self._seen = (clock(), steady())
        logging.getLogger("apscheduler").setLevel(logging.CRITICAL)  # what matters of it is told in the journal
        self._scheduler = BackgroundScheduler(timezone=UTC, executors={"default": DebugExecutor()})
        self._scheduler.add_listener(self._library_told, EVENT_JOB_MISSED | EVENT_JOB_ERROR)
        self._thread = threading.Thread(target=self._work, name="schedule", daemon=True)

    def catch_up(self) -> None:
        """Read the recipes, and ask for what was missed or not finished; a time is told that is left out."""
        sweep(self._store)
        self._reread(catching_up=True)

    def start(self) -> None:
        """Catch up, then wait for times, in threads of its own."""
        self.catch_up()
        self._scheduler.start()
        self._thread.start()
        self._tell_next()

    def hear(self, event: Event) -> None:
        """An event of the fleet: what came to its end is not asked for again by the next scheduler."""
        fires = self._fires.get(event.recipe)
        if fires is not None and event.kind in ("finished", "held") and event.state != "interrupted":
            # Up to what was asked for by now: a time that comes next is not done by what has ended.
            self._inbox.put(("settled", event.recipe, fires.fired))

    def reread(self) -> None:
        """Read the recipes again now; may be called by a signal's handler."""
        self._inbox.put(("reread", "", None))

    def close(self) -> None:
        """Wait for no more times; what was heard so far is kept."""
        if self._thread.is_alive():
            self._scheduler.shutdown()
            self._inbox.put(("close", "", None))
            self._thread.join()
        else:
            self._drain()

    @property
    def names(self) -> tuple[str, ...]:
        """The recipes that have a schedule now."""
        return tuple(self._plans)

    def _work(self) -> None:
        tick = time.monotonic() + self._tick_s
        while True:
            try:
                kind, what, upto = self._inbox.get(timeout=max(0.0, tick - time.monotonic()))
            except queue.Empty:
                kind, what, upto = "tick", "", None
                tick = time.monotonic() + self._tick_s
            if kind == "close":
                return
            try:
                self._take(kind, what, upto)
            except Exception as error:  # whatever it is, the other recipes have their times
                self._take("fault", f"{type(error).__name__}: {error}", None)

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._take(*self._inbox.get())

    def _take(self, kind: _Kind, what: str, upto: datetime | None) -> None:
        if kind in ("tick", "reread"):
            self._tick(asked=kind == "reread")
        elif kind == "fault":
            self._journal.tell("fault", what, message=what)
        elif what in self._plans and kind == "settled":
            self._keep(replace(self._fires[what], settled=upto))
        elif what in self._plans:
            self._came(self._plans[what], late=kind == "missed")
            self._tell_next()

    def _came(self, plan: Plan, *, late: bool = False) -> None:
        """A time came, or is found to have passed: once, however many there were, and never one that was seen to."""
        fires, now = self._fires[plan.name], self._clock()
        missed = fires.newest_missed(plan.expression, plan.zone, now)
        if missed is None:
            return
        late = late or (now - missed).total_seconds() > LATE_S
        if late and plan.skips_missed:
            text = (
                f"{plan.name}: missed {missed.strftime('%a %Y-%m-%d %H:%M %Z')}; it is left out, as missed: skip says"
            )
            self._journal.tell("missed", text, recipe=plan.name, time=_utc(missed), run=False)
            # Nothing was begun: what an earlier time began is not forgotten for it.
            self._keep(replace(fires, since=missed))
            return
        text = f"{plan.name}: {'missed' if late else 'the time is'} {shown(missed, plan.zone)}"
        self._journal.tell(*("missed" if late else "fired", text), recipe=plan.name, time=_utc(missed), run=True)
        self._keep(replace(fires, fired=missed))
        self._add([Request(plan.given, TRIGGER)])

    def _reread(self, *, catching_up: bool = False) -> None:
        reading = self._recipes.read()
        for name, fault in reading.faults.items():
            if self._faults.get(name) != fault:
                kept = "; the schedule that it had stays" if name in reading.plans else ""
                self._journal.tell("broken", f"{name}: {fault}{kept}", recipe=name, message=fault)
        self._faults = reading.faults
        for name in [name for name in self._plans if name not in reading.plans]:
            self._drop(name)
        for plan in reading.plans.values():
            if self._plans.get(plan.name) != plan:
                self._take_up(plan, catching_up=catching_up)

    def _drop(self, name: str) -> None:
        del self._plans[name], self._fires[name]
        with suppress(JobLookupError):  # one that came for the last time was removed by the library
            self._scheduler.remove_job(name)
        self._journal.tell("unscheduled", f"{name}: has no schedule any more", recipe=name)

    def _take_up(self, plan: Plan, *, catching_up: bool) -> None:
        """Plan a recipe that is new here or has another schedule, and see to what was missed before we were here."""
        now, known = self._clock(), self._known(plan.name)
        if known is None:
            fires = Fires(plan.name, since=now)
        else:
            # While we were here nothing was missed: what changes now counts from now.
            fires = known.as_of(now) if catching_up else replace(known.as_of(now), since=max(now, known.since))
            if catching_up and fires is not known and known.seen > now:
                self._tell_clock(now - known.seen)
        self._plans[plan.name] = plan
        if fires != known:
            self._keep(fires)
        else:
            self._fires[plan.name] = fires
        self._schedule(plan)
        if catching_up:
            self._came(plan)
            if fires.unsettled and self._fires[plan.name].fired == fires.fired:
                self._journal.tell("resumed", f"{plan.name}: goes on with what was begun", recipe=plan.name)
                self._add([Request(plan.given, TRIGGER)])

    def _schedule(self, plan: Plan) -> None:
        trigger = CronTrigger(plan.expression, plan.zone)
        first = trigger.get_next_fire_time(None, max(self._clock(), self._fires[plan.name].seen))
        if first is None:
            self._journal.tell("never", f"{plan.name}: {trigger} never comes", recipe=plan.name)
        self._scheduler.add_job(
            lambda: self._inbox.put(("fire", plan.name, None)),
            trigger,
            id=plan.name,
            next_run_time=first,
            coalesce=True,
            misfire_grace_time=LATE_S if plan.skips_missed else None,
            replace_existing=True,
        )

    def _tick(self, *, asked: bool = False) -> None:
        """Look whether something happened that nobody tells: the clock was set, the machine slept, a file changed."""
        now, steady = self._clock(), self._steady()
        drift = (now - self._seen[0]) - timedelta(seconds=steady - self._seen[1])
        self._seen = now, steady
        told = asked
        if abs(drift) > _STEP:
            self._tell_clock(drift)
            told = True
        if drift < -CORRECTION:
            for plan in self._plans.values():
                self._keep(self._fires[plan.name].as_of(now))
                self._schedule(plan)
        if asked or self._recipes.changed():
            before = self._plans.copy()
            self._reread()
            told = told or self._plans != before
        self._scheduler.wakeup()  # it counts its wait in seconds that do not pass in sleep
        if told:
            self._tell_next()

    def _known(self, name: str) -> Fires | None:
        try:
            return read_fires(self._store, name)
        except QuantmintError as error:
            self._journal.tell("fault", f"{name}: {error}", recipe=name, message=str(error))
            return None

    def _keep(self, fires: Fires) -> None:
        self._fires[fires.name] = fires
        try:
            write_fires(self._store, fires)
        except QuantmintError as error:  # a full disk delays no recipe; only what was missed may not be known later
            self._journal.tell("fault", f"{fires.name}: {error}", recipe=fires.name, message=str(error))

    def _tell_next(self) -> None:
        now = self._clock()
        coming: dict[str, datetime] = {}
        for plan in self._plans.values():
            first = CronTrigger(plan.expression, plan.zone).get_next_fire_time(self._fires[plan.name].seen, now)
            if first is not None:
                coming[plan.name] = first
        self._planned(coming)
        if not coming:
            self._journal.tell("next", "no recipe has a schedule", recipes=[])
            return
        soonest = min(coming.values())
        names = sorted(name for name, first in coming.items() if first == soonest)
        at = shown(soonest, self._plans[names[0]].zone)
        self._journal.tell(
            "next", f"next: {', '.join(names)} at {at} (in {span(soonest - now)})", recipes=names, time=_utc(soonest)
        )

    def _tell_clock(self, drift: timedelta) -> None:
        way = "ahead" if drift > timedelta(0) else "back"
        text = f"the clock went {way} by {span(abs(drift))}: it was set, or the machine slept"
        self._journal.tell("clock", text, seconds=round(drift.total_seconds()))

    def _library_told(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_MISSED:
            self._inbox.put(("missed", event.job_id, None))
        else:
            self._inbox.put(("fault", f"{event.job_id}: {event.exception}", None))


def _utc(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
