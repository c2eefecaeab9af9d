"""One cell of a workload against a server that runs; looking at the machine and the load generator meanwhile.

`vllm bench serve` is one asyncio thread: where it uses all of a core, answers wait for it, and what is measured is the
client. Its log says when the measured requests are about to be sent, and its result how long they took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eval import load_generator
from eval.measurements import CellResult
from eval.workloads import Cell
from pipeline.base.processes import run_logged
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.running.sensors import Reading, Sensor
from pipeline.serving.running.server import Server

CLIENT_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
"""The variables of `vllm bench serve`: no network, and output that is seen at once."""
WINDOW_S = 5.0
"""Seconds that a share is taken over. Sending the first requests fills some tenths of a second, and holds up nobody."""
TICK_S = 0.5
_MACHINE_EVERY = 2  # ticks


def run_cell(
    vllm: VllmEnvironment,
    cell: Cell,
    server: Server,
    *,
    model: Path,
    folder: Path,
    log: Path,
    seed: int = 0,
    gpus: int = 1,
    watch: Callable[[str], None] = lambda _: None,
    started: Callable[[int], None] = lambda _: None,
) -> CellResult:
    """A cell's figures, its JSON in ``folder``; `StageError` of the client, `MeasurementError` for lost requests."""

    path = folder / f"{cell.name}.json"
    path.unlink(missing_ok=True)
    argv = load_generator.command(
        vllm.executable,
        cell,
        base_url=server.base_url,
        model=model,
        served_model_name=server.model_name,
        result=path,
        seed=seed,
    )
    env = CLIENT_ENV | server.client_environment()
    run_logged(argv, log, what=f"vllm bench serve on {cell.name}", env=env, watch=watch, started=started)
    return load_generator.read(path, cell, gpus=gpus, log=log)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen while the measured requests ran; `client_cpu` is a share of one core."""

    readings: tuple[Reading, ...]
    client_cpu: float | None


@dataclass(slots=True)
class _Run:
    """One run of the load generator, whose log begins at a byte."""

    pid: int | None
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
        self._run = _Run(pid, self._log.stat().st_size if self._log.exists() else 0)

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            cpu = None if run.pid is None else cpu_seconds(run.pid)
            if cpu is not None:
                run.used.append(Used(time.monotonic(), cpu))
            if self._sensor is not None and ticks % _MACHINE_EVERY == 0:
                at, reading = time.monotonic(), self._sensor()
                run.readings += [] if reading is None else [(at, reading)]
            ticks += 1

    def _runs(self, run: _Run) -> bool:
        try:
            with self._log.open("rb") as stream:
                stream.seek(run.log_from)
                return load_generator.RUNS.encode() in stream.read()
        except OSError:
            return False


class Used(NamedTuple):
    """CPU seconds used up to a moment of the monotonic clock."""

    at: float
    cpu: float


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of everything below a process, itself left out, ended children included; None where nothing is."""
    import psutil

    used = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                used.append(sum(process.cpu_times()[:4]))
    return sum(used) if used else None


def busiest(used: Sequence[Used], window: float = WINDOW_S) -> float | None:
    """The largest share of one core over any `window` seconds, or over all of less; None for fewer than two looks."""
    if len(used) < 2:
        return None
    shares = []
    for first, start in enumerate(used):
        end = next((look for look in used[first + 1 :] if look.at - start.at >= window), None)
        if end is not None:
            shares.append(_share(start, end))
    return max(shares) if shares else _share(used[0], used[-1])


def _share(start: Used, end: Used) -> float:
    return max(0.0, end.cpu - start.cpu) / (end.at - start.at)
