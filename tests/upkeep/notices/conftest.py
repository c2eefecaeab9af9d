from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quantmint.pipeline.upkeep.fleet.events import Event
from tests.upkeep.notices.receiver import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def event() -> Callable[..., Event]:
    def make(kind: str = "finished", recipe: str = "tiny", **fields: Any) -> Event:
        given = {"at": "2026-03-28T02:00:00Z", "trigger": "schedule", "queued": 0, "running": 0} | fields
        return Event(kind=kind, recipe=recipe, **given)

    return make
