"""A resident scheduler with a clock that the test sets: no time is waited for, and a step is over when it returns."""

from __future__ import annotations

import json
import queue
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apscheduler.executors.base
import apscheduler.schedulers.base
import pytest

from pipeline.fleet.events import Event
from pipeline.fleet.requests import Request
from pipeline.schedule.journal import Journal
from pipeline.schedule.reading import Recipes
from pipeline.schedule.resident import Resident

_PATIENCE_S = 20


@dataclass
class Clock:
    """The time of day, and the seconds that no setting changes."""

    now: datetime
    steady: float = 0.0

    def passes(self, length: timedelta) -> None:
        self.now += length
        self.steady += length.total_seconds()

    def is_set(self, length: timedelta) -> None:
        """A sleep, or a step: the time of day is another, and hardly a second was counted."""
        self.now += length

    def rules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """APScheduler reads the time of day by itself."""
        clock = self

        class Set(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return clock.now.astimezone(tz)

        monkeypatch.setattr(apscheduler.schedulers.base, "datetime", Set)
        monkeypatch.setattr(apscheduler.executors.base, "datetime", Set)


@dataclass
class Scene:
    """Recipes in ./recipes, a store, and one scheduler at a time. ``asked`` are the recipes that a fleet was given."""

    store: Path
    clock: Clock
    asked: list[str] = field(default_factory=list)
    planned: dict[str, datetime] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    _lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    resident: Resident | None = None

    def recipe(self, name: str, **refresh: object) -> Path:
        path = Path("recipes") / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        section = json.dumps(refresh)  # which is YAML
        path.write_text(f"name: {name}\nextends: tiny-ptpc-fp8kv\nrefresh: {section}\n", encoding="utf-8")
        return path

    def start(self, *recipes: str) -> None:
        def add(requests: Iterable[Request]) -> None:
            for request in requests:
                assert request.trigger == "schedule"
                self.asked.append(request.recipe)

        def planned(fires: Any) -> None:
            self.planned = {name: moment.astimezone(UTC) for name, moment in fires.items()}

        self.resident = Resident(
            self.store,
            Recipes(recipes),
            add=add,
            journal=Journal(self._lines.put, as_json=True),
            planned=planned,
            clock=lambda: self.clock.now,
            steady=lambda: self.clock.steady,
            tick_s=3600.0,
        )
        self.resident.start()
        self.turn()

    def stop(self) -> None:
        if self.resident is not None:
            self.resident.close()
            self.resident = None
            self._collect(None)

    def turn(self) -> None:
        """What its half-minute does, and then everything that has come by now."""
        assert self.resident is not None
        self.resident.reread()
        self._meet()
        self.comes()

    def comes(self) -> None:
        """What has come by now."""
        assert self.resident is not None
        self.resident._scheduler._process_jobs()
        self._meet()

    def at(self, moment: datetime) -> None:
        """Time passes."""
        self.clock.passes(moment - self.clock.now)
        self.turn()

    def ends(self, recipe: str, state: str = "ran") -> None:
        """The fleet is done with a recipe."""
        assert self.resident is not None
        at = self.clock.now.isoformat()
        self.resident.hear(
            Event(kind="finished", recipe=recipe, at=at, trigger="schedule", queued=0, running=0, state=state)  # type: ignore[arg-type]
        )
        self._meet()

    def of(self, *events: str) -> list[dict[str, Any]]:
        """What was told, of some kinds."""
        return [line for line in self.told if line["event"] in events]

    def _meet(self) -> None:
        assert self.resident is not None
        token = secrets.token_hex(8)
        self.resident._inbox.put(("fault", token, None))
        self._collect(token)

    def _collect(self, token: str | None) -> None:
        while True:
            try:
                line = json.loads(self._lines.get(timeout=_PATIENCE_S if token else 0))
            except queue.Empty:
                assert token is None, "the scheduler's thread has ended"
                return
            if token is not None and line.get("message") == token:
                return
            self.told.append(line)
