"""Looking at the machine and at the load generator while a cell runs.

    with LoadWatch(sensor, log) as watch:
        run_logged(argv, log, started=watch.follow, ...)
    watch.seen(duration)            # of the measured requests alone

The load generator imports for seconds, warms up, and counts tokens when all is answered: its log says when the measured
requests are about to be sent, and its result how long they took.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from eval.load_generator import RUNS
from pipeline.measuring.client import Processes, Used, busiest
from pipeline.measuring.reading import Reading, Sensor

TICK_S = 0.5
_MACHINE_EVERY = 2  # ticks


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen while the measured requests ran; `client_cpu` is a share of one core."""

    readings: tuple[Reading, ...]
    client_cpu: float | None


@dataclass(slots=True)
class _Run:
    """One run of the load generator, whose log begins at a byte."""

    processes: Processes | None
    log_from: int
    began: float | None = None
    used: list[Used] = field(default_factory=list)
    readings: list[tuple[float, Reading]] = field(default_factory=list)


class LoadWatch:
    """A thread that looks twice a second; `log` is the load generator's, which may have older lines in it."""

    def __init__(self, sensor: Sensor | None, log: Path) -> None:
        self._sensor, self._log = sensor, log
        self._run = _Run(None, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="load watch", daemon=True)

    def follow(self, pid: int) -> None:
        """The load generator is below this process. One that is followed later takes its place: the first warmed up."""
        self._run = _Run(Processes(pid), self._log.stat().st_size if self._log.exists() else 0)

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def seen(self, duration: float) -> Seen:
        """What falls into the measured run, which took so many seconds. Nothing where its beginning was not seen."""
        run = self._run
        if run.began is None:
            return Seen((), None)
        end = run.began + duration - TICK_S  # the beginning was seen up to a tick late
        return Seen(
            readings=tuple(reading for at, reading in run.readings if at <= end),
            client_cpu=busiest([look for look in run.used if look.at <= end]),
        )

    def _look(self) -> None:
        ticks = 0
        while not self._over.wait(TICK_S):
            run = self._run
            if run.began is None and not self._runs(run):
                continue
            run.began = time.monotonic() if run.began is None else run.began
            cpu = None if run.processes is None else run.processes.cpu_seconds()
            if cpu is not None:
                run.used.append(Used(time.monotonic(), cpu))
            if self._sensor is not None and ticks % _MACHINE_EVERY == 0:
                at, reading = time.monotonic(), self._sensor.read()
                run.readings += [] if reading is None else [(at, reading)]
            ticks += 1

    def _runs(self, run: _Run) -> bool:
        try:
            with self._log.open("rb") as stream:
                stream.seek(run.log_from)
                return RUNS.encode() in stream.read()
        except OSError:
            return False
