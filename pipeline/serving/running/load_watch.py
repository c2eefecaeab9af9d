"""Watch machine, load generator and API server while a cell is measured.

`vllm bench serve` is one asyncio thread, and so is each API server of vLLM, which detokenizes answers. When one uses
all of a core, answers queue up there and the accelerator is not what is measured. The load generator's log shows when
the measured requests begin, its result how long they took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantmint.eval import load_generator
from quantmint.pipeline.serving.running.sensors import Sensor, SensorReading

TICK_S = 0.5
_SENSOR_TICKS = 2  # ticks from one reading of the sensor to the next


@dataclass(frozen=True, slots=True)
class LoadSamples:
    """Samples of the time in which the measured requests ran.

    ``client_cpu`` and ``server_cpu`` are shares of one core, averaged over that time: of the load generator's event
    loop, and of the busiest API server's; None when there are too few samples.
    """

    readings: tuple[SensorReading, ...]
    client_cpu: float | None
    server_cpu: float | None = None


class CpuSample(NamedTuple):
    """CPU seconds that a thread has used at a moment of the monotonic clock."""

    at: float
    cpu: float


class LoadWatch:
    """A context manager whose thread takes samples twice a second.

    ``log`` is the load generator's, which may begin with lines of earlier runs. API servers are the processes below
    ``server``; None when they run elsewhere.
    """

    def __init__(self, sensor: Sensor | None, log: Path, server: int | None = None) -> None:
        self._sensor, self._log, self._server = sensor, log, server
        self._pid: int | None = None
        self._log_offset = 0  # the byte at which this run's lines begin
        self._began: float | None = None
        self._client: dict[int, list[CpuSample]] = {}
        self._api_servers: dict[int, list[CpuSample]] = {}
        self._readings: list[tuple[float, SensorReading]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load watch", daemon=True)

    def follow(self, pid: int) -> None:
        """Watch the load generator that runs below process ``pid``."""
        self._log_offset = self._log.stat().st_size if self._log.exists() else 0
        self._pid = pid

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def samples(self, duration: float) -> LoadSamples:
        """Return the samples of the measured requests, which took ``duration`` seconds.

        They are empty when the watch did not see the requests begin.
        """
        if self._began is None:
            return LoadSamples((), None)
        end = self._began + duration - TICK_S  # the beginning is noticed up to a tick late
        readings = tuple(reading for at, reading in self._readings if at <= end)
        return LoadSamples(readings, busiest_share(self._client, end), busiest_share(self._api_servers, end))

    def _run(self) -> None:
        ticks = 0
        while not self._stopped.wait(TICK_S):
            if self._pid is None or (self._began is None and not self._requests_began()):
                continue
            self._began = time.monotonic() if self._began is None else self._began
            _sample(self._client, self._pid, load_generator.WORDS)
            if self._server is not None:
                _sample(self._api_servers, self._server, ())
            if self._sensor is not None and ticks % _SENSOR_TICKS == 0:
                at, reading = time.monotonic(), self._sensor()
                self._readings += [] if reading is None else [(at, reading)]
            ticks += 1

    def _requests_began(self) -> bool:
        with suppress(OSError), self._log.open("rb") as stream:
            stream.seek(self._log_offset)
            return load_generator.RUNS.encode() in stream.read()
        return False


def _sample(samples: dict[int, list[CpuSample]], pid: int, words: Sequence[str]) -> None:
    for process, cpu in event_loops(pid, words).items():
        samples.setdefault(process, []).append(CpuSample(time.monotonic(), cpu))


def event_loops(pid: int, words: Sequence[str] = ()) -> Mapping[int, float]:
    """Return the CPU seconds of the event loops below a process: the main thread of each load generator or API server.

    Only processes whose command line has all ``words`` count, because a helper of the load generator may use a whole
    core without delaying any answer (seen at the first of several launches on a GPU). Other threads, which tokenize and
    send, do not count either, nor do vLLM's engine and worker processes (VLLM::EngineCore, VLLM::Worker_TP0), which
    wait for the accelerator in a busy loop.
    """
    import psutil

    loops: dict[int, float] = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                line = process.cmdline()
                title = " ".join(line)
                is_worker = "::" in title.partition(" ")[0] and "::APIServer" not in title
                if not is_worker and not set(words) - set(line):
                    main = next(thread for thread in process.threads() if thread.id == process.pid)
                    loops[process.pid] = main.user_time + main.system_time
    return loops


def busiest_share(loops: Mapping[int, Sequence[CpuSample]], end: float) -> float | None:
    """Return the largest share of a core that one event loop used until ``end``; None without two samples of any.

    A process with at most half as many samples as the longest is a short-lived helper and does not count.
    """
    until_end = [[sample for sample in samples if sample.at <= end] for samples in loops.values()]
    most = max(map(len, until_end), default=0)
    lasting = [samples for samples in until_end if len(samples) > max(1, most / 2)]
    shares = [max(0.0, s[-1].cpu - s[0].cpu) / (s[-1].at - s[0].at) for s in lasting]
    return max(shares, default=None)
