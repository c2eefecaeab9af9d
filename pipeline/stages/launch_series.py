"""The launches of a proof of throughput: fresh servers of both sides by turns, each measured cell by cell.

A server that is started anew has another memory layout and finds the machine warmer: launches differ by more than the
requests of one, so the launch is what is repeated, and sides take turns so that a drift of the machine meets both. The
first launch of all finds files, caches and clocks cold: one of the baseline before it is discarded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.throughput import early
from quantmint.eval.gate.validity import disagreement
from quantmint.eval.measurements import CellResult, Launch, Side, order, reuse_order
from quantmint.eval.verdict import Verdict
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import InvalidMeasurementError, StageError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.load_client import LoadClient
from quantmint.pipeline.serving.running.load_watch import LoadSamples, LoadWatch
from quantmint.pipeline.serving.running.log import scan_log
from quantmint.pipeline.serving.running.sensors import SensorReading, sensor_for, summarize
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.baseline_launches import launches_to_reuse
from quantmint.pipeline.stages.serve import (
    SERVER_LOG,
    faults,
    held_to,
    launch_plan,
    model_key,
    vllm_device,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, write_json

LAUNCH, REUSED = "launch.json", "reused.json"
_SEEDS = 1000  # more cells than any workload has


@dataclass(frozen=True, slots=True)
class Turn:
    """A launch to make: `number` counts the fresh launches of both sides, `replicate` those of its side, from 0.

    Launches of both sides with the same replicate send the same prompts; prompts differ by cell and replicate.
    """

    side: Side
    number: int
    replicate: int
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether the launch was measured to its end, which its file shows, because it is written last."""
        return (self.folder / LAUNCH).is_file()


class Series:
    """The launches of both sides in alternation, kept in the stage's working folder.

    A series that reuses launches of an earlier one keeps them in `REUSED`, so that it resumes with the same ones after
    an interruption. Once they disagree with its own launches, that file says so and they no longer count.
    """

    def __init__(self, job: Job, version: int) -> None:
        """Load the launches to reuse: those in the working folder, else the newest in the store.

        None are reused where the stage is made again on purpose, or a series that reused none is resumed. `version` is
        that of the stage that measures.
        """
        self._job = job
        if job.again and (job.path / REUSED).is_file():  # left by an attempt that broke
            shutil.rmtree(job.path / "launches", ignore_errors=True)
            (job.path / REUSED).unlink()
        self._launches_a_side = job.setting.recipe.gate.throughput.launches
        self._begun = any(job.path.glob(f"launches/*/{LAUNCH}"))
        self._is_warm = False
        self._reused: tuple[Launch, ...] = ()
        self._disagreement: str | None = None
        if (job.path / REUSED).is_file():
            state = read_json(job.path / REUSED)
            self._reused = tuple(Launch.from_json(launch) for launch in state["launches"])
            self._disagreement = state["disagreement"]
        elif not (self._begun or job.again):
            model = job.inputs[model_key("baseline")].fingerprint
            self._reused = launches_to_reuse(job.setting, model, version)
            if self._reused:
                self._write_reused()

    def measure(self) -> tuple[Launch, ...]:
        """Make the missing launches, and return all that count in order of time, numbered from 0.

        Reused launches are replaced by fresh ones where they disagree with the first fresh ones. Raises
        `InvalidMeasurementError` for a launch that cannot be measured.
        """
        if not self._reused:
            return self._measure(order(self._launches_a_side))
        start, agreed, disagreed = reuse_order(self._launches_a_side)
        progress, day = self._job.progress, (self._reused[-1].started or "an earlier day")[:10]
        if self._disagreement is None:
            progress.say(
                f"reusing {len(self._reused)} of the baseline's {self._launches_a_side} launches, of {day}, "
                "if the fresh ones agree with them"
            )
        launches = self._measure(start, of=len(start) + len(agreed))
        if self._disagreement is None:
            fresh = [launch for launch in launches if launch.side == "baseline"]
            log = self._turns(start)[fresh[-1].number].folder / SERVER_LOG
            self._disagreement = disagreement(self._reused, fresh, vllm_device(log).hardware)
            if self._disagreement is not None:
                self._write_reused()
        if self._disagreement is not None:
            progress.warn(
                f"the baseline's launches of {day} are not reused but made anew, as they disagree with the fresh ones: "
                f"{self._disagreement}"
            )
            return self._measure((*start, *disagreed))
        progress.say(f"the launches of {day} agree with the fresh ones")
        fresh_launches = self._measure((*start, *agreed))
        count = len(self._reused)
        return (*self._reused, *(replace(launch, number=launch.number + count) for launch in fresh_launches))

    def _write_reused(self) -> None:
        launches = [launch.to_json() for launch in self._reused]
        write_json(self._job.path / REUSED, {"launches": launches, "disagreement": self._disagreement})

    def _turns(self, sides: Sequence[Side]) -> tuple[Turn, ...]:
        folder = self._job.path / "launches"
        return tuple(
            Turn(side, number, sides[:number].count(side), folder / f"{number:02}-{side}")
            for number, side in enumerate(sides)
        )

    def _measure(self, sides: Sequence[Side], *, of: int | None = None) -> tuple[Launch, ...]:
        """Make the unfinished launches of ``sides`` in order, and return the launches until the series is decided.

        `of` is the length of the whole series, for messages.
        """
        job, turns, total = self._job, self._turns(sides), of or len(sides)
        missing = sum(not turn.finished for turn in turns)
        if self._begun:
            job.progress.say(f"{len(turns) - missing} of {total} launches are there already")
            self._begun = False
        if missing and not self._is_warm:  # of a series that goes on after a break, too
            job.progress.say("a launch of the baseline that does not count")
            discarded_launch(job)
            self._is_warm = True
        launches: list[Launch] = []
        with job.progress.bar(missing * len(job.setting.workload.cells), "cells") as advance:
            for turn in turns:
                if not turn.finished:
                    job.progress.say(f"launch {turn.number + 1} of {total}: the {turn.side}")
                    make_launch(job, turn, advance)
                launches.append(Launch.from_json(read_json(turn.folder / LAUNCH)))
                if _is_decided(job.setting, launches):
                    job.progress.say(f"decided after {len(launches) // 2} launches a side of at most {len(turns) // 2}")
                    break
        return tuple(launches)


def _is_decided(setting: Setting, launches: Sequence[Launch]) -> bool:
    """Return whether the launches decide a series that may end early: every cell passes, or a cell fails.

    Only equally many launches of both sides are judged, and only cells without a fixed rate of requests.
    """
    recipe = setting.recipe
    gate = recipe.gate.throughput
    if not gate.stop_early or gate.min_ratio is None or len(launches) % 2:
        return False
    policy = recipe.gate.policy(setting.suite, recipe.target.hardware, recipe.quantization.schemes)
    verdicts = []
    for cell in setting.workload.cells:
        if cell.rate is None:  # of an offered load no speed is judged
            before, after = (
                [launch.cells[cell.name].output_throughput for launch in launches if launch.side == side]
                for side in ("baseline", "candidate")
            )
            verdicts.append(early(before, after, gate.min_ratio, policy)[0])
    return Verdict.FAIL in verdicts or (bool(verdicts) and set(verdicts) == {Verdict.PASS})


def discarded_launch(job: Job) -> None:
    """Serve the baseline once and send the unmeasured prompts of every cell, as a warm-up of the machine."""
    model, log = model_folder(job.inputs[model_key("baseline")]), job.path / "launches" / "discarded" / SERVER_LOG
    vllm = job.setting.vllm
    assert vllm is not None  # noqa: S101 - a server runs, so there is one
    with job.servers.fresh("baseline", launch_plan(job.setting, "baseline", model), log) as server:
        client = LoadClient(vllm, server, model)
        for cell in job.setting.workload.cells:
            client.warm_up(cell, seed=-1)


def make_launch(job: Job, turn: Turn, advance: Callable[[int], None]) -> None:
    """Serve the side of ``turn``, measure each cell, write the launch's file last, and call `advance` after each cell.

    An unfinished folder of the turn is removed first. Raises `InvalidMeasurementError` for a cell that cannot be
    measured.
    """
    model = model_folder(job.inputs[model_key(turn.side)])
    plan = launch_plan(job.setting, turn.side, model)
    shutil.rmtree(turn.folder, ignore_errors=True)  # half a launch is none: its server is gone
    turn.folder.mkdir(parents=True)
    started = datetime.now(UTC)
    results: dict[str, CellResult] = {}
    readings: list[tuple[SensorReading, ...]] = []
    clients: list[float] = []  # shares of a core
    loops: list[float] = []
    with job.servers.fresh(turn.side, plan, turn.folder / SERVER_LOG) as server:
        for index, cell in enumerate(job.setting.workload.cells):
            seed = _SEEDS * turn.replicate + index
            results[cell.name], samples = _measure(job, turn, plan, server, model, cell, seed)
            readings.append(samples.readings)
            clients += [] if samples.client_cpu is None else [round(samples.client_cpu, 3)]
            loops += [] if samples.server_cpu is None else [round(samples.server_cpu, 3)]
            advance(1)
    scan = held_to(plan, scan_log((turn.folder / SERVER_LOG).read_text(encoding="utf-8", errors="replace")), model)
    for finding in scan.findings:
        if turn.replicate == 0 or finding in scan.invalid:  # cautions are the same every time
            job.progress.warn(f"{turn.side}: {finding.why}: {finding.line}")
    launch = Launch(
        side=turn.side,
        number=turn.number,
        cells=results,
        kv_tokens=scan.kv_tokens,
        kv_cache_dtype=scan.kv_cache_dtype,
        started_seconds=round(server.started_seconds, 1),
        client_cpu=max(clients, default=None),
        server_cpu=max(loops, default=None),
        machine=summarize(readings),
        started=started.isoformat(timespec="seconds"),
        attention_backend=scan.attention_backend,
        faults=tuple(faults(scan)),
        device=vllm_device(turn.folder / SERVER_LOG).name,
    )
    write_json(turn.folder / LAUNCH, launch.to_json())


def _measure(
    job: Job, turn: Turn, plan: LaunchPlan, server: RunningServer, model: Path, cell: Cell, seed: int
) -> tuple[CellResult, LoadSamples]:
    vllm, gpus = job.setting.vllm, plan.layout.gpus
    assert vllm is not None  # noqa: S101 - a server runs, so there is one
    sensor = sensor_for(hardware(job.setting.recipe.target.hardware).kind, gpus=gpus, env=plan.env)
    log = turn.folder / f"{cell.name}.log"
    try:
        with LoadWatch(sensor, log, server.pid) as watch:
            client = LoadClient(vllm, server, model, gpus)
            result = client.measure(cell, folder=turn.folder, log=log, seed=seed, started=watch.follow)
    except StageError:
        server.get("/health")
        raise
    except MeasurementError as error:
        raise InvalidMeasurementError(f"bench {turn.side}: {error}") from error
    return result, watch.samples(result.duration)
