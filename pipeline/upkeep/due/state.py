"""What is known of a recipe between rounds: ``store/refresh/NAME.json``.

Written by whoever holds the recipe's lock, read by anybody. It decides nothing about content, which is the store's and
the releases' matter: losing it loses how the last attempt ended and how long it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from pipeline.store.disk import disk_errors, write_atomic
from pipeline.store.tree import REFRESH

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeState:
    """How the last attempt at a recipe ended. Times are ISO 8601 in UTC.

    ``last_attempt`` is when the last attempt ended; ``last_success`` when one last ended in PASS, with the
    release ``tag``, first seen at ``released``. ``last_exit`` is the code that a round counted, ``last_duration_s``
    the seconds of the last attempt that came to its end. ``attempts_failed`` counts rounds that failed since one did
    not.
    """

    name: str
    last_attempt: str | None = None
    last_success: str | None = None
    last_verdict: str | None = None
    last_exit: int | None = None
    last_duration_s: float | None = None
    attempts_failed: int = 0
    tag: str | None = None
    released: str | None = None
    reason: str = ""


def folder_of(root: Path) -> Path:
    """The folder of states, locks, logs and rounds in the store at ``root``."""
    return root / REFRESH


def state_path(root: Path, name: str) -> Path:
    """The file of a recipe's state."""
    return folder_of(root) / f"{name}.json"


def read_state(root: Path, name: str, *, warn: Callable[[str], None]) -> RecipeState:
    """The state of a recipe; an empty one where there is no file, and, with a warning, where it cannot be used."""
    from pydantic import TypeAdapter

    path = state_path(root, name)
    try:
        raw = path.read_bytes()
        state = TypeAdapter(RecipeState).validate_json(raw, strict=True)
        if state.name == name and json.loads(raw).get("schema") == SCHEMA:
            return state
    except FileNotFoundError:
        return RecipeState(name=name)
    except (OSError, ValueError):
        pass
    warn(f"{path} is no state of {name} of schema {SCHEMA}: it starts without a past")
    return RecipeState(name=name)


def write_state(root: Path, state: RecipeState) -> None:
    """Write a state, whole or not at all; the caller holds the recipe's lock. Raises `StoreError`."""
    path = state_path(root, state.name)
    text = json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1, ensure_ascii=False) + "\n"
    raw = text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then
    with disk_errors(path, needed=len(raw)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, raw, temporary=path.with_suffix(".json.tmp"))


def all_states(root: Path, *, warn: Callable[[str], None]) -> dict[str, RecipeState]:
    """Every recipe's state by its name, sorted."""
    names = sorted(path.stem for path in folder_of(root).glob("*.json"))
    return {name: read_state(root, name, warn=warn) for name in names}


def moment(text: str | None) -> datetime | None:
    """A time of a state, None for none."""
    return None if text is None else datetime.fromisoformat(text)
