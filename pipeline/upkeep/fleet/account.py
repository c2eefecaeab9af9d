"""What a round spends, hours and disk, and what it tells: events while it goes on, a summary at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pipeline.upkeep.fleet.attempt import without_secrets
from pipeline.upkeep.fleet.events import Ended, Event, Kind, Summary, now_utc
from pipeline.upkeep.fleet.jobs import Job, Options

_MEASURED_S: Final = 60.0


class Account:
    """Of one round, which begins now. ``waiting`` and ``running`` are counted for each event."""

    def __init__(
        self,
        options: Options,
        *,
        on_event: Callable[[Event], None],
        warn: Callable[[str], None],
        waiting: Sized,
        running: Sized,
    ) -> None:
        self._limit_s = options.max_s
        self._on_event = on_event
        self._warn = warn
        self._waiting, self._running = waiting, running
        self._warnings: list[str] = []
        self._started, self._began = now_utc(), time.monotonic()
        self.ended: list[Ended] = []
        self.growth = Growth(options.max_disk, options.store)

    def left_s(self) -> float | None:
        """Seconds that are left, below zero when they are overdrawn; None where there is no limit."""
        return None if self._limit_s is None else self._began + self._limit_s - time.monotonic()

    def warn(self, message: str) -> None:
        """Something went wrong that stops nothing."""
        message = without_secrets(message, os.environ)  # of a proxy, a bucket or the Hub, in whatever words
        self._warnings.append(message)
        self._warn(message)

    def tell(self, kind: Kind, job: Job, **facts: Any) -> None:
        """Something happened to a job; ``facts`` are fields of the event."""
        facts = {"reason": job.due.reason, **facts}
        self._send(kind=kind, recipe=job.name, trigger=job.request.trigger, attempt=job.attempts, **facts)

    def end(self, ended: Ended) -> None:
        """A recipe left the round."""
        ended = replace(ended, reason=without_secrets(ended.reason, os.environ))
        self.ended.append(ended)
        told = {name: getattr(ended, name) for name in Ended.__slots__ if name not in ("attempts", "changes")}
        self._send(kind="held" if ended.state == "held" else "finished", attempt=ended.attempts, **told)

    def summary(self, stopped_by: int | None) -> Summary:
        """The round is over."""
        return Summary(
            started=self._started,
            finished=now_utc(),
            ended=tuple(self.ended),
            grown_bytes=self.growth.grown(),
            stopped_by=stopped_by,
            warnings=tuple(self._warnings),
        )

    def _send(self, **facts: Any) -> None:
        self._on_event(Event(at=now_utc(), queued=len(self._waiting), running=len(self._running), **facts))


class Growth:
    """Bytes by which folders grow, at most ``limit`` (None: nothing is measured).

    Folders are walked for that, a second for some hundred thousand files: so what was measured stands for a minute,
    unless a recipe has ended since.
    """

    def __init__(self, limit: int | None, folder: Path) -> None:
        self._limit = limit
        self._folders = {folder.resolve()}
        self._before = 0 if limit is None else bytes_below(self._folders)
        self._grown, self._stands_until = 0, 0.0

    def watch(self, folders: Iterable[Path]) -> None:
        """Count what these folders grow from now on too; they need not exist yet."""
        resolved = {folder.resolve() for folder in folders}
        new = {one for one in resolved if not any(one.is_relative_to(known) for known in self._folders)}
        if new and self._limit is not None:
            self._before += bytes_below(self._folders | new) - bytes_below(self._folders)
        self._folders |= new

    def grown(self) -> int | None:
        """Bytes by which the folders have grown, below zero where they shrank; None where there is no limit."""
        return None if self._limit is None else bytes_below(self._folders) - self._before

    def left(self, *, measure: bool = False) -> int | None:
        """Bytes that were left when that was last measured, below zero when they were overdrawn."""
        if self._limit is None:
            return None
        if measure and time.monotonic() >= self._stands_until:
            self._grown = self.grown() or 0
            self._stands_until = time.monotonic() + _MEASURED_S
        return self._limit - self._grown

    def changed(self) -> None:
        """A recipe has ended: what was measured does not stand any more."""
        self._stands_until = 0.0


def bytes_below(folders: Iterable[Path]) -> int:
    """Bytes of the files below folders. Each file counts once, whatever its names; one that goes meanwhile does not."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    status = os.lstat(f"{parent}/{name}")  # a Path for each would be slow
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
