"""One cell of a workload against a server that runs; looking at machine, load generator and API server meanwhile.

`vllm bench serve` is one asyncio thread, and so is each API server of vLLM, which turns tokens into text: where one
uses all of a core, answers wait for it, and what is measured is not the accelerator. The client's log says when the
measured requests are about to be sent, and its result how long they took.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantmint.eval import load_generator
from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.processes import run_logged
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.running.sensors import Sensor, SensorReading
from quantmint.pipeline.serving.running.server import RunningServer

CLIENT_ENV = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"},
    "OPENAI_API_KEY": "unused",
}
"""The variables of `vllm bench serve`: no network, and output that is seen at once."""
TICK_S = 0.5
_MACHINE_EVERY = 2  # ticks
_PATIENCE_S = 3600.0  # for one answer
_LEAST_TEXT = 0.05  # characters a token: what has fewer repeats a token that stands for none


def run_cell(
    vllm: VllmEnvironment,
    cell: Cell,
    server: RunningServer,
    *,
    model: Path,
    folder: Path,
    log: Path,
    seed: int = 0,
    gpus: int = 1,
    watch: Callable[[str], None] = lambda _: None,
    started: Callable[[int], None] = lambda _: None,
) -> CellResult:
    """A cell's figures, its JSON in ``folder``, after other prompts that are not measured.

    `StageError` of the client, `MeasurementError` for lost requests and answers without text.
    """
    warm_up(server, cell, model, seed)
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
    run_logged(argv, log, what=f"vllm bench serve on {cell.name}", env=CLIENT_ENV, watch=watch, started=started)
    return load_generator.read(path, cell, gpus=gpus, log=log)


def warm_up(server: RunningServer, cell: Cell, model: Path, seed: int) -> None:
    """Have a server answer prompts that no measured one begins like, as many at a time as the cell has.

    Kernels are chosen, memory is laid out and clocks are up before anything counts. `MeasurementError` where the
    answers have no text: a broken model that repeats such a token is timed by what looks for text in it.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    words = int(config.get("text_config", config)["vocab_size"])
    draw = random.Random(f"discarded {cell.name} {seed}")  # noqa: S311 - no secret
    longest = cell.input_len, max(1, cell.longest - cell.input_len)
    asked = [[draw.randint(-(-4 * most // 5), most) for most in longest] for _ in range(cell.discarded)]
    # Special tokens stand at either end of a vocabulary.
    prompts = [[draw.randrange(words // 4, max(words // 4 + 1, 3 * words // 4)) for _ in range(n)] for n, _ in asked]

    def answer(prompt: list[int], length: int) -> tuple[int, int]:
        how = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"model": server.model_name, "prompt": prompt, **how}
        said = json.loads(server.post("/v1/completions", body, timeout=_PATIENCE_S))
        return len(said["choices"][0]["text"]), said["usage"]["completion_tokens"]

    with ThreadPoolExecutor(min(cell.in_flight, cell.discarded)) as pool:
        answers = list(pool.map(answer, prompts, [length for _, length in asked]))
    characters, tokens = (sum(column) for column in zip(*answers, strict=True))
    if characters < _LEAST_TEXT * tokens:
        raise MeasurementError(
            f"cell {cell.name}: {tokens} tokens came back as {characters} characters: it repeats a token without text"
        )


@dataclass(frozen=True, slots=True)
class LoadSamples:
    """What was seen while the measured requests ran; `client_cpu` and `server_cpu` are shares of one core, over all of
    that time, of the client's event loop and the busiest API server's."""

    readings: tuple[SensorReading, ...]
    client_cpu: float | None
    server_cpu: float | None = None


class LoadWatch:
    """A thread that looks twice a second; `log` is the load generator's, which may have older lines in it.

    The API servers are below the process `server`, None where they are elsewhere.
    """

    def __init__(self, sensor: Sensor | None, log: Path, server: int | None = None) -> None:
        self._sensor, self._log, self._server = sensor, log, server
        self._pid: int | None = None
        self._log_from = 0  # the byte at which the run's lines begin
        self._began: float | None = None
        self._client: dict[int, list[CpuSample]] = {}
        self._loops: dict[int, list[CpuSample]] = {}
        self._readings: list[tuple[float, SensorReading]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="load watch", daemon=True)

    def follow(self, pid: int) -> None:
        """The load generator is below this process."""
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        self._pid = pid

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def seen(self, duration: float) -> LoadSamples:
        """What falls into the measured run, which took so many seconds. Nothing where its beginning was not seen."""
        if self._began is None:
            return LoadSamples((), None)
        end = self._began + duration - TICK_S  # the beginning was seen up to a tick late
        readings = tuple(reading for at, reading in self._readings if at <= end)
        return LoadSamples(readings, _busiest(self._client, end), _busiest(self._loops, end))

    def _look(self) -> None:
        ticks = 0
        while not self._over.wait(TICK_S):
            if self._pid is None or (self._began is None and not self._runs()):
                continue
            self._began = time.monotonic() if self._began is None else self._began
            for above, words, looks in (
                (self._pid, load_generator.WORDS, self._client),
                (self._server, (), self._loops),
            ):
                for pid, used in ({} if above is None else event_loops(above, words)).items():
                    looks.setdefault(pid, []).append(CpuSample(time.monotonic(), used))
            if self._sensor is not None and ticks % _MACHINE_EVERY == 0:
                at, reading = time.monotonic(), self._sensor()
                self._readings += [] if reading is None else [(at, reading)]
            ticks += 1

    def _runs(self) -> bool:
        with suppress(OSError), self._log.open("rb") as stream:
            stream.seek(self._log_from)
            return load_generator.RUNS.encode() in stream.read()
        return False


class CpuSample(NamedTuple):
    """CPU seconds used up to a moment of the monotonic clock."""

    at: float
    cpu: float


def event_loops(pid: int, words: Sequence[str] = ()) -> Mapping[int, float]:
    """CPU seconds of the first thread of each process below one: the event loop of a load generator or an API server.

    Those alone whose command line has all ``words``: what a load generator starts beside itself may use all of a core,
    as was seen at the first of several launches on a GPU, and holds up nobody. Nor do other threads, which take text
    apart and send it. What works for a server of vLLM says so in its title (VLLM::EngineCore, VLLM::Worker_TP0), and
    waits for the accelerator busily.
    """
    import psutil

    found: dict[int, float] = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                line = process.cmdline()
                title = " ".join(line)
                if ("::" not in title.partition(" ")[0] or "::APIServer" in title) and not set(words) - set(line):
                    first = next(thread for thread in process.threads() if thread.id == process.pid)
                    found[process.pid] = first.user_time + first.system_time
    return found


def _busiest(loops: Mapping[int, Sequence[CpuSample]], end: float) -> float | None:
    """The largest share of a core that one of them used until then; None for fewer than two looks at each.

    What was there for less than half of the time, a helper that a process starts, held up nobody for long.
    """
    looks = [[look for look in used if look.at <= end] for used in loops.values()]
    most = max(map(len, looks), default=0)
    shares = [max(0.0, of[-1].cpu - of[0].cpu) / (of[-1].at - of[0].at) for of in looks if len(of) > max(1, most / 2)]
    return max(shares, default=None)
