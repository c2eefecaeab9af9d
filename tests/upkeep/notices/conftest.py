from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quantmint.pipeline.upkeep import notices
from quantmint.pipeline.upkeep.fleet.records import Ended
from tests.upkeep.notices.receiver import Receiver, receiving


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(notices, "FIRST_WAIT_S", 0.01)
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def ended() -> Callable[..., Ended]:
    def make(recipe: str = "tiny", **fields: Any) -> Ended:
        return Ended(recipe=recipe, **{"state": "ran", "exit_code": 0, **fields})

    return make
