"""What Prometheus is shown, in a file for the node exporter's textfile collector.

Of each recipe what the store keeps between rounds, so that several schedulers on one store show the same; of a round
what it told last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from eval.verdict import Verdict
from pipeline.base.errors import StoreError, UserError
from pipeline.upkeep.due.state import RecipeState, all_states, is_gone, moment
from pipeline.upkeep.fleet.events import Event, State

SUFFIX: Final = ".prom"
_DONE: Final[frozenset[State]] = frozenset({"ran", "current", "held"})
_STILL_DUE: Final[frozenset[State]] = frozenset({"resting", "elsewhere", "left"})

# name below quantmint_: (help, a recipe's value in its state, None where there is none)
_OF_STATE: Final[Mapping[str, tuple[str, Callable[[RecipeState], float | None]]]] = {
    "last_success_timestamp_seconds": (
        "When the recipe last ended in PASS.",
        lambda state: _seconds(state.last_success),
    ),
    "last_attempt_timestamp_seconds": (
        "When the last attempt at the recipe ended.",
        lambda state: _seconds(state.last_attempt),
    ),
    "last_duration_seconds": (
        "How long the last attempt took that came to its end.",
        lambda state: state.last_duration_s,
    ),
    "release_timestamp_seconds": (
        "When the newest release that a round knows of was made or first seen.",
        lambda state: _seconds(state.released),
    ),
    "attempts_failed": (
        "Rounds in which the recipe failed since one in which it did not.",
        lambda state: state.attempts_failed,
    ),
}


class Metrics(Collector):
    """The metrics of one process, in the file ``path``, which is whole at any time.

    ``warn`` hears of a file that cannot be written, and of a state that is damaged, once each. Raises
    `UserError` for a name that the collector would pass over, and for a folder that cannot be written to.
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        try:
            write_to_textfile(str(path), self._registry)
        except OSError as error:
            raise UserError(f"the metrics file {path} cannot be written: {error.strerror or error}") from None

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
            self._write()

    def plan(self, fires: Mapping[str, float]) -> None:
        """Take over when each recipe is looked at next (seconds since the epoch), in place of all that was known."""
        with self._lock:
            self._next = dict(fires)
            self._write()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every metric, for `prometheus_client`."""
        states = self._states()
        for name, (text, value_of) in _OF_STATE.items():
            values = {recipe: value_of(state) for recipe, state in states.items()}
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
        yield _by_recipe("due", "1 for a recipe that was due when it was last looked at and is not done.", self._due)
        yield _by_recipe(
            "release_damaged",
            "1 for a recipe whose release could not be read when it was last looked at.",
            self._damaged,
        )
        if self._next:
            yield _by_recipe("next_fire_timestamp_seconds", "When the recipe's schedule comes next.", self._next)
        yield GaugeMetricFamily("quantmint_queue_length", "Recipes that wait to be run.", value=self._queued)
        yield GaugeMetricFamily("quantmint_running", "Recipes that are being run.", value=self._running)

    def _states(self) -> Mapping[str, RecipeState]:
        """Those of the recipes that there are."""
        try:
            states = all_states(self._store, warn=self._tell)
        except StoreError as error:  # away for now; what is known of the queue is shown all the same
            self._tell(str(error))
            return {}
        return {name: state for name, state in states.items() if not is_gone(state)}

    def _write(self) -> None:
        try:
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            self._tell(f"the metrics file {self._path} cannot be written: {error.strerror or error}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._warn(text)


def _by_recipe(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"quantmint_{name}", text, labels=["recipe"])
    for recipe, value in sorted(values.items()):
        family.add_metric([recipe], value)
    return family


def _seconds(text: str | None) -> float | None:
    found = moment(text)
    return None if found is None else found.timestamp()
