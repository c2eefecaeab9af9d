"""What Prometheus is shown: of each recipe what the store keeps between rounds, of a round what it told last.

::

    board = Board(store)
    fleet.run(requests, options, on_event=board.hear)
    prometheus_client.generate_latest(board.registry)

The registry is our own: nothing of this process but what is named here. Ages come from the files at the time of asking,
so that several schedulers on one store show the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from eval.verdict import Verdict
from pipeline.errors import StoreError
from pipeline.fleet.events import Event, State
from pipeline.refresh.state import RecipeState, all_states, is_gone, moment

_DONE: Final[frozenset[State]] = frozenset({"ran", "current", "held"})

# name below quantmint_: (help, a recipe's value in its state at a time, None where there is none)
_OF_STATE: Final[Mapping[str, tuple[str, Callable[[RecipeState, float], float | None]]]] = {
    "last_success_timestamp_seconds": (
        "When the recipe last ended in PASS.",
        lambda state, now: _seconds(state.last_success),
    ),
    "last_attempt_timestamp_seconds": (
        "When the last attempt at the recipe ended.",
        lambda state, now: _seconds(state.last_attempt),
    ),
    "last_duration_seconds": (
        "How long the last attempt took that came to its end.",
        lambda state, now: state.last_duration_s,
    ),
    "release_age_seconds": (
        "Time since the newest release that a round knows of was made or first seen.",
        lambda state, now: None if (since := _seconds(state.released)) is None else max(0.0, now - since),
    ),
    "attempts_failed": (
        "Rounds in which the recipe failed since one in which it did not.",
        lambda state, now: state.attempts_failed,
    ),
}


class Board(Collector):
    """The metrics of one process. ``clock`` gives seconds since the epoch; ``warn`` hears of a file that is damaged."""

    def __init__(self, store: Path, *, warn: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._warn = warn
        self._clock = clock
        self._lock = threading.Lock()
        self._queued = self._running = 0
        self._due: dict[str, bool] = {}
        self._damaged: dict[str, bool] = {}
        self._heard: set[str] = set()
        self._next: dict[str, float] = {}
        self._told = ""
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def hear(self, event: Event) -> None:
        """Take over what an event says of the queue and of its recipe."""
        with self._lock:
            self._queued, self._running = event.queued, event.running
            if event.state != "broken":  # which a deleted one is, too
                self._heard.add(event.recipe)
            if event.state == "damaged" or event.state in _DONE:
                self._damaged[event.recipe] = event.state == "damaged"
            if event.state in ("broken", "unknown", "damaged"):
                self._due.pop(event.recipe, None)
            elif event.state in _DONE:
                self._due[event.recipe] = False
            elif event.kind != "stage" and not _unlooked(event):
                self._due[event.recipe] = True

    def plan(self, fires: Mapping[str, float]) -> None:
        """Take over when each recipe is looked at next (seconds since the epoch), in place of all that was known."""
        with self._lock:
            for name in self._next.keys() - fires.keys():  # nobody looks at it here any more
                self._due.pop(name, None)
                self._damaged.pop(name, None)
                self._heard.discard(name)
            self._next = dict(fires)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every metric, for `prometheus_client`."""
        now, (states, missing) = self._clock(), self._states()
        for name, (text, value_of) in _OF_STATE.items():
            values = {recipe: value_of(state, now) for recipe, state in states.items()}
            yield _by_recipe(name, text, {recipe: value for recipe, value in values.items() if value is not None})
        verdicts = GaugeMetricFamily(
            "quantmint_last_verdict",
            "1 for the verdict of the recipe's last run, 0 for others.",
            labels=["recipe", "verdict"],
        )
        for recipe, state in states.items():
            for verdict in Verdict:
                verdicts.add_metric([recipe, verdict.value], float(state.last_verdict == verdict.value))
        yield verdicts
        with self._lock:
            due, damaged = ({name: told[name] for name in told.keys() - missing} for told in (self._due, self._damaged))
            fires, queued, running = dict(self._next), self._queued, self._running
        yield _by_recipe("due", "1 for a recipe that was due when it was last looked at and is not done.", due)
        yield _by_recipe(
            "release_damaged", "1 for a recipe whose release could not be read when it was last looked at.", damaged
        )
        if fires:
            yield _by_recipe("next_fire_timestamp_seconds", "When the recipe's schedule comes next.", fires)
        yield GaugeMetricFamily("quantmint_queue_length", "Recipes that wait to be run.", value=queued)
        yield GaugeMetricFamily("quantmint_running", "Recipes that are being run.", value=running)

    def _states(self) -> tuple[Mapping[str, RecipeState], frozenset[str]]:
        """Those of the recipes that there are, and the names of those that are gone."""
        try:
            states = all_states(self._store, warn=self._warn)
        except StoreError as error:  # away for now; what is known of the queue is shown all the same
            if self._told != str(error):
                self._told = str(error)
                self._warn(self._told)
            return {}, frozenset()
        with self._lock:
            known = self._heard | self._next.keys()
            missing = frozenset(name for name, state in states.items() if name not in known and is_gone(state))
        return {name: state for name, state in states.items() if name not in missing}, missing


def _unlooked(event: Event) -> bool:
    """Whether nobody could look at it, so that all that is known of it is what somebody typed, perhaps a path."""
    return event.state in {"failed", "interrupted"} and not event.attempt and not event.causes


def _by_recipe(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"quantmint_{name}", text, labels=["recipe"])
    for recipe, value in sorted(values.items()):
        family.add_metric([recipe], value)
    return family


def _seconds(text: str | None) -> float | None:
    found = moment(text)
    return None if found is None else found.timestamp()
