"""What Prometheus is shown, in a file for the node exporter's textfile collector.

Of each recipe what the store keeps between rounds, so that several schedulers on one store show the same; of a round
what it told last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from eval.verdict import Verdict
from pipeline.base.errors import UserError
from pipeline.upkeep.due.state import RecipeState, all_states, is_gone, moment
from pipeline.upkeep.fleet.events import Event, State

SUFFIX: Final = ".prom"
_DONE: Final[frozenset[State]] = frozenset({"ran", "current", "held"})
_STILL_DUE: Final[frozenset[State]] = frozenset({"resting", "elsewhere", "left"})


class Metrics:
    """The metrics of one process, in the file ``path``; ``warn`` hears of a fault once.

    Raises `UserError` for a name that the collector would pass over, and for a folder that cannot be written to.
    """

    def __init__(self, path: Path, store: Path, *, warn: Callable[[str], None]) -> None:
        if path.suffix != SUFFIX:
            raise UserError(
                f"the metrics file {path} would not be read: the textfile collector takes files that end in {SUFFIX}",
                hint=f"{path.with_suffix(SUFFIX)}",
            )
        self._path, self._store, self._warn = path, store, warn
        self._lock = threading.Lock()
        self._queued = self._running = 0
        self._due: dict[str, bool] = {}
        self._damaged: dict[str, bool] = {}
        self._next: dict[str, float] = {}
        self._told: set[str] = set()
        try:
            self._write()
        except OSError as error:
            raise UserError(self._unwritten(error)) from None

    def hear(self, event: Event) -> None:
        """Take over what an event says of the queue and of its recipe."""
        if event.kind == "stage":
            return
        with self._lock:
            self._queued, self._running = event.queued, event.running
            if event.state == "damaged" or event.state in _DONE:
                self._damaged[event.recipe] = event.state == "damaged"
            if event.state in ("broken", "unknown", "damaged"):
                self._due.pop(event.recipe, None)
            elif event.state in _DONE:
                self._due[event.recipe] = False
            elif event.kind in ("queued", "started") or event.state in _STILL_DUE:
                self._due[event.recipe] = True
            self._renew()

    def plan(self, fires: Mapping[str, float]) -> None:
        """Take over when each recipe is looked at next (seconds since the epoch), in place of all that was known."""
        with self._lock:
            self._next = dict(fires)
            self._renew()

    def _renew(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._tell(self._unwritten(error))

    def _write(self) -> None:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

        registry = CollectorRegistry()
        known = all_states(self._store, warn=self._tell)
        states = {name: state for name, state in known.items() if not is_gone(state)}

        def by_recipe(name: str, text: str, values: Mapping[str, float | None]) -> None:
            gauge = Gauge(f"quantmint_{name}", text, ["recipe"], registry=registry)
            for recipe, value in sorted(values.items()):
                if value is not None:
                    gauge.labels(recipe).set(value)

        def of_state(name: str, text: str, value_of: Callable[[RecipeState], float | None]) -> None:
            by_recipe(name, text, {recipe: value_of(state) for recipe, state in states.items()})

        of_state("last_success_timestamp_seconds", "Last end in PASS.", lambda one: _seconds(one.last_success))
        of_state("last_attempt_timestamp_seconds", "End of the last attempt.", lambda one: _seconds(one.last_attempt))
        of_state("last_duration_seconds", "Of the last attempt that came to its end.", lambda one: one.last_duration_s)
        of_state("release_timestamp_seconds", "Newest release that is known.", lambda one: _seconds(one.released))
        of_state("attempts_failed", "Rounds that failed since one that did not.", lambda one: one.attempts_failed)
        verdicts = Gauge("quantmint_last_verdict", "1 for the last verdict.", ["recipe", "verdict"], registry=registry)
        for recipe, state in states.items():
            for verdict in Verdict:
                verdicts.labels(recipe, verdict.value).set(state.last_verdict == verdict.value)
        by_recipe("due", "1 where it was due when last looked at, and is not done.", self._due)
        by_recipe("release_damaged", "1 where its release could not be read when last looked at.", self._damaged)
        if self._next:
            by_recipe("next_fire_timestamp_seconds", "When its schedule comes next.", self._next)
        Gauge("quantmint_queue_length", "Recipes that wait.", registry=registry).set(self._queued)
        Gauge("quantmint_running", "Recipes that run.", registry=registry).set(self._running)
        write_to_textfile(str(self._path), registry)

    def _unwritten(self, error: OSError) -> str:
        return f"the metrics file {self._path} cannot be written: {error.strerror or error}"

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._warn(text)


def _seconds(text: str | None) -> float | None:
    found = moment(text)
    return None if found is None else found.timestamp()
