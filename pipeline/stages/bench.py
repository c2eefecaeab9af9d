"""bench: vLLM's own load generator against fresh servers of both sides by turns, cell by cell.

A server that is started anew has another memory layout and finds the machine warmer: launches differ by more than the
requests of one, so the launch is what is repeated, and sides take turns so that a drift of the machine meets both. The
first launch of all finds files, caches and clocks cold, and would always be the baseline's: one before it is discarded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import harmonic_mean, mean, median
from typing import Any

from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.throughput import early
from quantmint.eval.measurements import CellResult, Launch, Side, order
from quantmint.eval.throughput import noise
from quantmint.eval.verdict import Verdict
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import InvalidMeasurementError, StageError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.sections import ThroughputGate
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.load_client import LoadClient
from quantmint.pipeline.serving.running.load_watch import LoadSamples, LoadWatch
from quantmint.pipeline.serving.running.log import scan_log
from quantmint.pipeline.serving.running.sensors import SensorReading, sensor_for, summarize
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.estimate import START_S, TOKEN_S, Estimate
from quantmint.pipeline.stages.serve import (
    SERVER_LOG,
    SIDES,
    ServeStage,
    faults,
    held_to,
    image_settings,
    launch_plan,
    model_key,
    require_server,
    vllm_device,
    vllm_version,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage, write_json
from quantmint.pipeline.store.gc import list_runs

LAUNCHES, LAUNCH = "launches.json", "launch.json"
_SEEDS = 1000  # more cells than any workload has


class BenchStage(Stage):
    """Both sides. A launch that was finished is not made again after an interruption; its time tells of the break."""

    family = "bench"
    version = 3  # 3: discarded prompts and launch, lengths that vary
    asks_server = True
    measures = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether speed is to be measured, and what answers is the server whose speed matters."""
        launches = setting.recipe.gate.throughput.launches
        return super().is_planned(setting) and setting.recipe.evaluation.runtime == "vllm" and launches > 0

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return the check of the server."""
        return (require_server,)

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the time of all launches, as `outlook` forecasts it."""
        return estimate.bench

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Both models."""
        return {model_key(side): model_key(side) for side in SIDES}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """How both are served, the cells by content, how often."""
        return {
            "launch": {side: ServeStage(side).settings(setting)["launch"] for side in SIDES},
            "hardware": setting.recipe.target.hardware,
            "cells": [cell.to_json() for cell in setting.workload.cells],
            "launches": setting.recipe.gate.throughput.launches,
            **_early(setting.recipe.gate.throughput),
            **image_settings(setting),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """vLLM is both the server and the client."""
        return vllm_version(setting)

    def run(self, job: Job) -> Output:
        """Launch by launch, each kept as soon as it is finished."""
        series = order(job.setting.recipe.gate.throughput.launches)
        turns = [
            Turn(side, number, series[:number].count(side), job.path / "launches" / f"{number:02}-{side}")
            for number, side in enumerate(series)
        ]
        cells = job.setting.workload.cells
        launches: list[Launch] = []
        left = sum(not turn.finished for turn in turns)
        if left < len(turns):
            job.progress.say(f"{len(turns) - left} of {len(turns)} launches are there already")
        if left:  # of a series that goes on after a break, too
            job.progress.say("a launch of the baseline that does not count")
            discarded_launch(job)
        with job.progress.bar(left * len(cells), "cells") as advance:
            for turn in turns:
                if not turn.finished:
                    job.progress.say(f"launch {turn.number + 1} of {len(turns)}: the {turn.side}")
                    make_launch(job, turn, advance)
                launches.append(Launch.from_json(read_json(turn.folder / LAUNCH)))
                if _is_decided(job.setting, launches):
                    job.progress.say(f"decided after {len(launches) // 2} launches a side of at most {len(turns) // 2}")
                    break
        write_json(job.path / LAUNCHES, {"launches": [launch.to_json() for launch in launches]})
        ratios = {cell.name: _ratio(cell, launches) for cell in cells}
        found = [f"launch {launch.number} ({launch.side}): {fault}" for launch in launches for fault in launch.faults]
        return Output(
            result={"faults": found, "ratios": ratios},
            summary=", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
            + f"; launches a side: {len(launches) // 2}",
        )


def _early(gate: ThroughputGate) -> dict[str, object]:
    """What launches that may end early end by; nothing where their number is fixed."""
    if not gate.stop_early:
        return {}
    return {"stop_early": {"min_ratio": gate.min_ratio, "confidence": gate.confidence}}


def _is_decided(setting: Setting, launches: Sequence[Launch]) -> bool:
    """Return whether launches so far decide a series that may end early: every cell passes, or one fails."""
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


def outlook(setting: Setting) -> dict[str, Any]:
    """What the stage will take: launches of both sides and the one that does not count, seconds of all.

    Each launch asks `prompts`, measured or not, for `output_tokens` at most. `noise` (relative, of the noisiest cell)
    and `ratio` (of the slowest) are those of the recipe's newest launches, as is the time; None where there are none.
    """
    cells, seen = setting.workload.cells, _newest(setting)
    count = 2 * setting.recipe.gate.throughput.launches + 1
    took = mean(launch.started_seconds for launch in seen) if seen else START_S
    for cell in cells:
        speeds = [launch.cells[cell.name].output_throughput for launch in seen]
        token = 1 / harmonic_mean(speeds) if speeds else TOKEN_S / cell.in_flight
        offered = 0.0 if cell.rate is None else cell.num_prompts / cell.rate
        took += token * _answers(cell, cell.discarded) + max(offered, token * _answers(cell, cell.num_prompts))
    sides = [[launch.cells[cell.name] for launch in seen if launch.side == side] for cell in cells for side in SIDES]
    return {
        "launches": count,
        **({"stop_early": True} if setting.recipe.gate.throughput.stop_early else {}),
        "prompts": sum(cell.num_prompts + cell.discarded for cell in cells),
        "output_tokens": sum(_answers(cell, cell.num_prompts + cell.discarded) for cell in cells),
        "seconds": count * took,
        "noise": max(map(noise, sides)) if seen else None,
        "ratio": min(_ratio(cell, seen) for cell in cells) if seen else None,
    }


def _answers(cell: Cell, prompts: int) -> int:
    return prompts * max(1, cell.longest - cell.input_len)


def _newest(setting: Setting) -> tuple[Launch, ...]:
    """The newest launches of the recipe that measured these cells; none where there are none."""
    for run in list_runs(setting.store.root):
        found = [
            print_ for stage, print_ in run.plan if stage == BenchStage.family and run.recipe == setting.recipe.name
        ]
        entry = setting.store.find(BenchStage.family, found[0]) if found else None
        launches = () if entry is None else read_launches(entry.path)
        if launches and all(cell.name in launch.cells for launch in launches for cell in setting.workload.cells):
            return launches
    return ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A launch to be made: `replicate` counts the launches of its side.

    The same number on both sides asks the same prompts; each cell and each number has its own.
    """

    side: Side
    number: int
    replicate: int
    folder: Path

    @property
    def finished(self) -> bool:
        """Its file is written last."""
        return (self.folder / LAUNCH).is_file()


def read_launches(folder: Path) -> tuple[Launch, ...]:
    """The launches of an entry, in the order in which they were made. Raises `MeasurementError`."""
    return tuple(Launch.from_json(launch) for launch in read_json(folder / LAUNCHES)["launches"])


def _ratio(cell: Cell, launches: Sequence[Launch]) -> float:
    """Median over median of the output throughput."""
    medians = [
        median(launch.cells[cell.name].output_throughput for launch in launches if launch.side == side)
        for side in ("candidate", "baseline")
    ]
    return medians[0] / medians[1]


def discarded_launch(job: Job) -> None:
    """Serve the baseline once and ask it every cell's discarded prompts."""
    model, log = model_folder(job.inputs[model_key("baseline")]), job.path / "launches" / "discarded" / SERVER_LOG
    vllm = job.setting.vllm
    assert vllm is not None  # noqa: S101 - a server runs, so there is one
    with job.servers.fresh("baseline", launch_plan(job.setting, "baseline", model), log) as server:
        client = LoadClient(vllm, server, model)
        for cell in job.setting.workload.cells:
            client.warm_up(cell, seed=-1)


def make_launch(job: Job, turn: Turn, advance: Callable[[int], None]) -> None:
    """Serve a side once, measure each cell, and write what was found last."""
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
            results[cell.name], seen = _measure(job, turn, plan, server, model, cell, seed)
            readings.append(seen.readings)
            clients += [] if seen.client_cpu is None else [round(seen.client_cpu, 3)]
            loops += [] if seen.server_cpu is None else [round(seen.server_cpu, 3)]
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
