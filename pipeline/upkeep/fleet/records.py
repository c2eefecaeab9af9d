"""The record of a recipe between rounds (``store/refresh/NAME.json``), and the summary of a round.

A record is written under the recipe's lock, and read by anybody. It decides nothing about content: losing it loses how
the last attempt ended and how long it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from quantmint.pipeline.store.disk import disk_errors, write_atomic
from quantmint.pipeline.store.tree import REFRESH

SCHEMA: Final = 1
_WORST_FIRST: Final = (5, 2, 4, 1, 3, 0)

State = Literal["ran", "current", "unknown", "damaged", "held", "broken", "failed", "elsewhere", "left", "interrupted"]
"""How a recipe left a round; docs/keeping-fresh.md says what each means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeState:
    """The record of a recipe's attempts between rounds. Times are ISO 8601 in UTC.

    ``last_attempt`` is when the last attempt ended, ``last_success`` when one last ended in PASS. ``tag`` is the newest
    known release, first seen at ``released``. ``last_exit`` is the exit code that the round counted,
    ``last_duration_s`` the seconds of the last attempt that came to its end. ``attempts_failed`` counts the rounds that
    failed since the last one that did not.
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
    """Return the folder of records, locks and logs in the store at ``root``."""
    return root / REFRESH


def state_path(root: Path, name: str) -> Path:
    """Return the path of a recipe's record in the store at ``root``."""
    return folder_of(root) / f"{name}.json"


def read_state(root: Path, name: str, *, warn: Callable[[str], None]) -> RecipeState:
    """Return the record of a recipe; an empty one without a file, and, with a warning, for a file that is invalid."""
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
    """Write a record in one step; the caller holds the recipe's lock. Raises `StoreError`."""
    path = state_path(root, state.name)
    text = json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1, ensure_ascii=False) + "\n"
    raw = text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then
    with disk_errors(path, needed=len(raw)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, raw, temporary=path.with_suffix(".json.tmp"))


def all_states(root: Path, *, warn: Callable[[str], None]) -> dict[str, RecipeState]:
    """Return every recipe's record by its name, sorted; ``warn`` is called for files that are invalid."""
    names = sorted(path.stem for path in folder_of(root).glob("*.json"))
    return {name: read_state(root, name, warn=warn) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a recipe in a round.

    ``exit_code`` is the code that the round counts. ``attempts`` is 0 for a recipe that was not run, ``duration_s`` is
    the time of all attempts. ``tag`` is the release that was published to ``places``. ``causes`` are the kinds of
    change that made the recipe due, ``changes`` phrases on them for people. ``log`` is the last attempt's log.
    """

    recipe: str
    state: State
    exit_code: int
    verdict: str | None = None
    attempts: int = 0
    duration_s: float = 0.0
    tag: str | None = None
    places: tuple[Mapping[str, object], ...] = ()
    causes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    reason: str = ""
    log: str | None = None

    def __str__(self) -> str:
        """Return one line for a log."""
        from quantmint.eval.report.numbers import duration

        failed = self.state == "failed"
        word = f"failed with exit code {self.exit_code}" if failed else self.state
        parts = [
            f"{self.recipe}: {self.verdict if self.state == 'ran' and self.verdict else word}",
            f" in {duration(self.duration_s)}" if self.attempts else "",
            f", released {self.tag}" if self.tag else "",
            f": {self.reason}" if self.reason else "",
            f" (log: {self.log})" if failed and self.log else "",
        ]
        return "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """A round: its start and end (ISO 8601, UTC), and how each recipe left it, in the order in which they left.

    ``grown_bytes`` is the growth of the store, None without a limit on the disk; ``stopped_by`` is the signal that
    ended the round.
    """

    started: str
    finished: str
    ended: tuple[Ended, ...]
    grown_bytes: int | None = None
    stopped_by: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return the worst of the recipes' exit codes, or 128 + N if signal N ended the round."""
        return worst(ended.exit_code for ended in self.ended) if self.stopped_by is None else 128 + self.stopped_by

    def to_json(self) -> dict[str, object]:
        """Return the fields, the schema and the exit code as plain data, for ``--json``."""
        return {"schema": SCHEMA, **asdict(self), "exit_code": self.exit_code}


def worst(codes: Iterable[int]) -> int:
    """Return the worst exit code: 5 before 2, 4, 1, 3 and 0; 0 for none. Any other code counts as 5."""
    ranks = [_WORST_FIRST.index(code) if code in _WORST_FIRST else 0 for code in codes]
    return _WORST_FIRST[min(ranks)] if ranks else 0


def now_utc() -> str:
    """Return the present time in ISO 8601, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
