"""A scheduler that stays: at the times of each recipe's schedule it asks one fleet to look whether the recipe is due.

A look at a recipe that is not due costs seconds and changes nothing, so nothing is remembered between two schedulers:
one that starts looks at everything, which makes up for what was missed and goes on with what was cut short; then it
sleeps to the next time. Several may run on one store, with no leader: the recipe's lock lets one through, and the
other finds nothing due, or the work of a scheduler that was killed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.processes import stop_signals
from quantmint.pipeline.upkeep.fleet.events import Event
from quantmint.pipeline.upkeep.fleet.jobs import Look, Options, Request
from quantmint.pipeline.upkeep.fleet.rounds import Fleet
from quantmint.pipeline.upkeep.schedule.export import EXAMPLE, Scheduled, here, load_scheduled

_LONGEST_SLEEP_S: Final = 30.0  # a sleeping machine's time does not pass for a wait, and files of recipes change

Tell = Callable[..., None]
"""``tell(event, text, **facts)``: something that the scheduler did, for people and for programs."""


class Schedules:
    """What is to be looked at when. No threads, no clock: ``now`` is given, aware.

    ``given`` are names or files of recipes; without any, those of ./recipes that have a schedule. A recipe that is
    broken meanwhile keeps the schedule that it had.
    """

    def __init__(self, given: Sequence[str], tell: Tell) -> None:
        self._given = tuple(given)
        self._tell = tell
        self._files: Mapping[Path, int] | None = None
        self._upto = datetime.min.replace(tzinfo=UTC)
        self.plans: dict[str, Scheduled] = {}

    def start(self, now: datetime) -> list[Scheduled]:
        """All recipes."""
        self.read()
        self._upto = now
        return list(self.plans.values())

    def came(self, now: datetime) -> list[Scheduled]:
        """The recipes whose time has come since the last call, each once."""
        since, self._upto = self._upto, now
        return [plan for plan in self.plans.values() if any(time <= now for time in plan.next_times(since, 1))]

    def coming(self, now: datetime) -> dict[str, datetime]:
        """When each recipe comes next, in its own zone."""
        return {plan.name: time for plan in self.plans.values() for time in plan.next_times(now, 1)}

    def changed(self) -> bool:
        """Whether a file of a recipe came, went or is another."""
        return self._files != self._stamps()

    def read(self) -> None:
        """Read all recipes."""
        self._files = self._stamps()
        plans = {}
        for given in self._given or here():
            try:
                plan = load_scheduled(given)
                fault = f"it has no schedule: {EXAMPLE}" if plan is None and self._given else ""
            except QuantmintError as error:
                plan, fault = self.plans.get(given), str(error)
            if fault:
                kept = "" if plan is None else "; the schedule that it had stays"
                self._tell("broken", f"{given}: {fault}{kept}", recipe=Path(given).stem, message=fault)
            if plan is not None:
                plans[given] = plan
        self.plans = plans

    def _stamps(self) -> dict[Path, int]:
        files = {*Path("recipes").glob("*.yaml"), *(Path(given) for given in self._given)}
        return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def stay(
    options: Options,
    recipes: Sequence[str],
    *,
    tell: Tell,
    hear: Callable[[Event], None],
    planned: Callable[[Mapping[str, datetime]], None],
    look: Look | None = None,
) -> int:
    """One fleet for all recipes, until a signal comes; the exit code: 0 after SIGTERM, by which services are stopped.

    Must be called in the process's first thread, which gets the signals. ``hear`` is told of the fleet's events,
    ``planned`` when each recipe comes next. Raises `UserError` where recipes are named and none of them has a schedule
    that can be used.
    """
    schedules, over = Schedules(recipes, tell), threading.Event()
    fleet = Fleet(options, on_event=hear, look=look, warn=lambda text: tell("warning", text, message=text))

    def ask(plans: Sequence[Scheduled]) -> None:
        for plan in plans:
            tell("fired", f"{plan.name}: is looked at", recipe=plan.name)
        fleet.add(Request(plan.given, "schedule") for plan in plans)

    def work() -> None:
        _tell_next(schedules, tell, planned)
        while not over.is_set():
            coming = schedules.coming(_now()).values()
            waits = [_LONGEST_SLEEP_S, *((time - _now()).total_seconds() for time in coming)]
            over.wait(max(0.0, min(waits)))
            try:
                came = schedules.came(_now())
                ask(came)
                if read := schedules.changed():
                    schedules.read()
                if came or read:
                    _tell_next(schedules, tell, planned)
            except Exception as error:  # whatever it is, the next time comes
                tell("fault", f"{type(error).__name__}: {error}", message=str(error))

    with stop_signals(fleet.stop):
        ask(schedules.start(_now()))
        if recipes and not schedules.plans:
            raise UserError("none of the recipes that were named has a schedule that can be used")
        thread = threading.Thread(target=work, name="schedule", daemon=True)
        thread.start()
        try:
            stopped_by = fleet.run().stopped_by or 0
        finally:
            over.set()
            thread.join()
    return 0 if stopped_by == signal.SIGTERM else 128 + stopped_by


def _tell_next(schedules: Schedules, tell: Tell, planned: Callable[[Mapping[str, datetime]], None]) -> None:
    coming = schedules.coming(_now())
    planned(coming)
    if not coming:
        tell("next", "no recipe has a schedule", recipes=[])
        return
    soonest = min(coming.values())
    names = sorted(name for name, time in coming.items() if time == soonest)
    at = soonest.strftime("%a %Y-%m-%d %H:%M %Z")
    utc = soonest.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tell("next", f"next: {', '.join(names)} at {at}", recipes=names, time=utc)


def _now() -> datetime:
    return datetime.now(UTC)
