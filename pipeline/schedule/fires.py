"""Which times of a recipe's schedule were seen to: ``store/refresh/schedule/NAME.json``.

A scheduler that was down knows from it what it missed, and what it had begun. Several schedulers on one store write the
same file; whose word comes last does not matter, for a time that is seen to twice is looked at twice and made once.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pipeline.refresh.state import folder_of, moment
from pipeline.schedule.cron import times
from pipeline.store.disk import disk_errors, write_atomic

SCHEMA: Final = 1
CORRECTION: Final = timedelta(hours=3)
"""A clock that is put back by more was wrong before, and counts anew; by less, what was done is not done again. It is
Debian cron's own measure."""
_WINDOWS: Final = tuple(timedelta(days=days) for days in (1 / 24, 1, 8, 32, 370))
_LEFTOVER_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Fires:
    """Times before ``since`` are nobody's concern; ``fired`` was given to the fleet, and ``settled`` was done by it.

    All in UTC: two times of another zone are compared by their clocks' faces (PEP 495).
    """

    name: str
    since: datetime
    fired: datetime | None = None
    settled: datetime | None = None

    @property
    def seen(self) -> datetime:
        """Up to here every time was seen to."""
        return self.since if self.fired is None else max(self.since, self.fired)

    @property
    def unsettled(self) -> bool:
        """Whether what was last begun did not come to its end: its scheduler was killed or told to stop."""
        return self.fired is not None and (self.settled is None or self.settled < self.fired)

    def as_of(self, now: datetime) -> Fires:
        """The same by a clock that was put right: what lies far ahead of it was written by a wrong one."""
        if self.seen - now <= CORRECTION:
            return self
        return Fires(self.name, since=now)

    def newest_missed(self, expression: str, zone: str, now: datetime) -> datetime | None:
        """The last time of a schedule that was not seen to, up to ``now``; None where there is none."""
        return newest_between(expression, zone, self.seen, now)


def newest_between(expression: str, zone: str, after: datetime, until: datetime) -> datetime | None:
    """The last time with ``after < time <= until``, in UTC; None where there is none.

    Short spans before ``until`` are looked at first: who was away for years does not count every minute of them.
    """
    for start in (*(until - window for window in _WINDOWS), after):
        newest = None
        for found in times(expression, zone, max(start, after)):
            instant = found.astimezone(UTC)
            if instant > until:
                break
            newest = instant
        if newest is not None or start <= after:
            return newest
    return None


def fires_path(root: Path, name: str) -> Path:
    """The file of a recipe's fires in the store at ``root``."""
    return folder_of(root) / "schedule" / f"{name}.json"


def read_fires(root: Path, name: str) -> Fires | None:
    """What was seen to; None where nothing is known, or what is there is no such file. Raises `StoreError`."""
    path = fires_path(root, name)
    with disk_errors(path):
        try:
            data = json.loads(path.read_bytes())
            since, fired, settled = (_utc(data[key]) for key in ("since", "fired", "settled"))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
    return None if since is None else Fires(name, since, fired, settled)


def write_fires(root: Path, fires: Fires) -> None:
    """Keep what was seen to, whole or not at all. Raises `StoreError`."""
    path = fires_path(root, fires.name)
    data = {
        "schema": SCHEMA,
        **{
            key: None if value is None else value.astimezone(UTC).isoformat()
            for key, value in (("since", fires.since), ("fired", fires.fired), ("settled", fires.settled))
        },
    }
    raw = (json.dumps(data, indent=1) + "\n").encode()
    with disk_errors(path, needed=len(raw)):
        path.parent.mkdir(parents=True, exist_ok=True)
        ours = f"{fires.name}.{socket.gethostname()}-{os.getpid()}.tmp"  # others write the same file
        write_atomic(path, raw, temporary=path.with_name(ours))


def _utc(text: str | None) -> datetime | None:
    found = moment(text)
    return None if found is None else found.astimezone(UTC)


def sweep(root: Path) -> None:
    """Remove what killed schedulers left half written."""
    for path in fires_path(root, "any").parent.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()
