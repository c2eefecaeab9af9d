"""How a round ended: a line for each recipe, one exit code, one file."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipeline.fleet.events import State
from pipeline.refresh.state import folder_of
from pipeline.store.disk import disk_errors, write_atomic

SCHEMA: Final = 1
_KEPT: Final = 50
_WORST_FIRST: Final = (5, 2, 4, 1, 3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a recipe left a round; the fields are those of `pipeline.fleet.events.Event`.

    ``attempts`` is 0 for one that was not run. ``changes`` are phrases for people, of what made it due.
    """

    recipe: str
    trigger: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A round: when it began and ended (ISO 8601, UTC), and how each recipe left it, the first first.

    ``grown_bytes`` is None where nobody limited the disk; ``stopped_by`` the signal that ended the round.
    """

    started: str
    finished: str
    ended: tuple[Ended, ...]
    grown_bytes: int | None = None
    stopped_by: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The worst of the recipes' codes, and 128 + N where signal N ended the round."""
        return worst(ended.exit_code for ended in self.ended) if self.stopped_by is None else 128 + self.stopped_by

    def to_json(self) -> dict[str, object]:
        """Plain data for a file and for ``--json``."""
        return {"schema": SCHEMA, **asdict(self), "exit_code": self.exit_code}


def worst(codes: Iterable[int]) -> int:
    """The exit code of several: 5 before 2, 4, 1, 3 and 0; 0 for none, and what is none of these counts as 5."""
    ranks = [_WORST_FIRST.index(code) if code in _WORST_FIRST else 0 for code in codes]
    return _WORST_FIRST[min(ranks)] if ranks else 0


def write_round(root: Path, summary: Summary) -> Path:
    """Keep a summary in ``store/refresh/rounds/``, and the newest 50 of them. Raises `StoreError`."""
    folder = folder_of(root) / "rounds"
    name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}-{secrets.token_hex(2)}.json"
    text = json.dumps(summary.to_json(), indent=1, ensure_ascii=False) + "\n"
    raw = text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then
    path = folder / name
    with disk_errors(path, needed=len(raw)):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, raw, temporary=path.with_suffix(".tmp"))
        for old in sorted(folder.glob("*.json"))[:-_KEPT]:
            old.unlink(missing_ok=True)
    return path
