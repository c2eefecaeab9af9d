"""What is known of a recipe between rounds: ``store/refresh/NAME.json``.

Written by whoever holds the recipe's lock, read by anybody. It decides nothing about content, which is the store's and
the releases' matter: losing it loses how long the last attempt took, and when the next may be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.store.disk import disk_errors, write_atomic
from pipeline.store.tree import QUARANTINE, REFRESH

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeState:
    """How the last attempt at a recipe ended, and when the next may be made. Times are ISO 8601 in UTC.

    ``last_attempt`` is when the last attempt ended; ``last_success`` when one last ended in PASS, with the
    release ``tag``, first seen at ``released``. ``last_exit`` is the code that a round counted, ``last_duration_s``
    the seconds of the last attempt that came to its end. ``attempts_failed`` counts rounds that failed since one did
    not, ``not_before`` is when the next is made at the soonest, and ``inputs`` the digest of what the recipe was to be
    made from: where that is another now, there is nothing to wait for. ``file`` is where the recipe stood, an absolute
    path on the machine that attempted it.
    """

    name: str
    last_attempt: str | None = None
    last_success: str | None = None
    last_verdict: str | None = None
    last_exit: int | None = None
    last_duration_s: float | None = None
    attempts_failed: int = 0
    not_before: str | None = None
    tag: str | None = None
    released: str | None = None
    inputs: str | None = None
    file: str | None = None
    reason: str = ""


def folder_of(root: Path) -> Path:
    """The folder of states, locks, logs and rounds in the store at ``root``."""
    return root / REFRESH


def state_path(root: Path, name: str) -> Path:
    """The file of a recipe's state."""
    return folder_of(root) / f"{name}.json"


def read_state(root: Path, name: str, *, warn: Callable[[str], None], aside: bool = True) -> RecipeState:
    """The state of a recipe, an empty one where there is none.

    A file that is none is put into the store's quarantine with a warning, or only told of (``aside`` False): nobody's
    checkpoint waits for it. Raises `StoreError` where it cannot be read.
    """
    path = state_path(root, name)
    with disk_errors(path):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return RecipeState(name=name)
    try:
        return _parse(raw, name)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        kept = _put_aside(root, path, name) if aside else "it stays there"
        warn(f"{path} cannot be used: {error}; {kept}, and {name} starts without a past")
        return RecipeState(name=name)


def _put_aside(root: Path, path: Path, name: str) -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    place = root / QUARANTINE / f"refresh-{name}-{stamp}.json"
    try:
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    except OSError as refused:
        return f"it stays there ({refused})"
    return f"it was moved to {place}"


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


def is_gone(state: RecipeState) -> bool:
    """Whether the recipe was deleted or renamed: its file is not there, and others of its folder are.

    Where the folder is not there either, or is empty, as on another machine or where a disk is mounted that is away,
    nobody can say; nor where it may not be read.
    """
    if state.file is None:
        return False
    file = Path(state.file)
    try:
        names = {path.name for path in file.parent.iterdir()}
    except OSError:
        return False
    return file.name not in names and any(name.endswith(".yaml") for name in names)


def moment(text: str | None) -> datetime | None:
    """A time of a state, None for none and for what is no time."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "name": (str,),
    "last_exit": (int,),
    "last_duration_s": (int, float),
    "attempts_failed": (int,),
    "reason": (str,),
}
_NEVER_NULL: Final = {"name", "attempts_failed", "reason"}


def _parse(raw: bytes, name: str) -> RecipeState:
    data: dict[str, Any] = json.loads(raw)
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"expected an object of schema {SCHEMA}")
    known = {field.name for field in fields(RecipeState)}
    for key, value in data.items():
        if key in known and not (value is None and key not in _NEVER_NULL):
            wanted = _KINDS.get(key, (str,))
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{key} is {value!r}")
    if data["name"] != name:
        raise ValueError(f"it is of {data['name']!r}")
    return RecipeState(**{key: value for key, value in data.items() if key in known})
