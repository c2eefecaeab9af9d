"""bench: measure the throughput of both sides with vLLM's own load generator, and forecast what that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import harmonic_mean, mean, median
from typing import Any

from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import Launch
from quantmint.eval.throughput import noise
from quantmint.eval.workloads import Cell
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.sections import ThroughputGate
from quantmint.pipeline.stages.baseline_launches import baseline_launches, launches_to_reuse
from quantmint.pipeline.stages.estimate import START_S, TOKEN_S, Estimate
from quantmint.pipeline.stages.launch_series import Series
from quantmint.pipeline.stages.serve import (
    SIDES,
    ServeStage,
    image_settings,
    launch_plan,
    model_key,
    require_server,
    vllm_version,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Check, Job, Output, Planned, Stage, write_json
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import list_runs

LAUNCHES = "launches.json"
_MEAN_LENGTH = 0.9
"""Of the longest prompt or answer of a cell, whose lengths are spread evenly from 80 to 100 % of it."""


class BenchStage(Stage):
    """Measure the throughput of both sides.

    After an interruption only launches that were not finished are made; the start times of the others show the break.
    """

    family = "bench"
    version = 3  # 3: discarded prompts and launch, lengths that vary
    asks_server = True
    measures = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe asks for launches and vLLM serves; the speed of other runtimes is not measured."""
        launches = setting.recipe.gate.throughput.launches
        return super().is_planned(setting) and setting.recipe.answered_by == "vllm" and launches > 0

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`."""
        return (require_server,)

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the forecast seconds of all launches (`outlook`), None where nothing is measured."""
        return estimate.bench

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Map the keys of the stages that hold the two models, `source` and `quantize`, to themselves."""
        return {model_key(side): model_key(side) for side in SIDES}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return both launch plans without the models' folders, the cells by content, and the number of launches."""
        return {
            "launch": {side: ServeStage(side).settings(setting)["launch"] for side in SIDES},
            "hardware": setting.recipe.target.hardware,
            "cells": [cell.to_json() for cell in setting.workload.cells],
            "launches": setting.recipe.gate.throughput.launches,
            **_early(setting.recipe.gate.throughput),
            **image_settings(setting),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return vLLM's version under "vllm"; it is both the server and the load generator."""
        return vllm_version(setting)

    def seconds_again(self, planned: Planned, seconds: float, before: Entry | None, setting: Setting) -> float:
        """Return ``seconds`` of an earlier series, scaled by the launches to measure now over those measured then.

        Unscaled where the earlier launches cannot be read, and where launches may end early.
        """
        try:
            launches = () if before is None else read_launches(before.path)
        except MeasurementError:
            launches = ()
        earlier = sum(not launch.reused for launch in launches)
        if not earlier or setting.recipe.gate.throughput.stop_early:
            return seconds
        reused = launches_to_reuse(setting, source_of(planned), self.version)
        now = 2 * setting.recipe.gate.throughput.launches - len(reused)
        return seconds * (now + 1) / (earlier + 1)

    def run(self, job: Job) -> Output:
        """Measure launch by launch; each is written as soon as it is finished, and not made again after a break."""
        cells = job.setting.workload.cells
        launches = Series(job, self.version).measure()
        write_json(job.path / LAUNCHES, {"launches": [launch.to_json() for launch in launches]})
        argv = launch_plan(job.setting, "baseline", Path("MODEL")).argv
        baseline_launches(job.setting, job.inputs[model_key("baseline")].fingerprint, self.version).add(launches, argv)
        ratios = {cell.name: _ratio(cell, launches) for cell in cells}
        faults_of_launches = [
            f"launch {launch.number} ({launch.side}): {fault}" for launch in launches for fault in launch.faults
        ]
        reused = sum(launch.reused for launch in launches)
        a_side = f"; launches a side: {len(launches) // 2}" + (f", {reused} of the baseline's reused" if reused else "")
        return Output(
            result={"faults": faults_of_launches, "ratios": ratios, **({"reused": reused} if reused else {})},
            summary=", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()) + a_side,
        )


def source_of(planned: Planned) -> str:
    """Return the fingerprint of the entry that holds the baseline's weights, from a planned bench stage."""
    inputs = planned.payload["inputs"]
    assert isinstance(inputs, Mapping)  # noqa: S101 - as the planner writes it
    return str(inputs[model_key("baseline")])


def _early(gate: ThroughputGate) -> dict[str, object]:
    """Return the settings that decide when launches end early; empty where their number is fixed."""
    if not gate.stop_early:
        return {}
    return {"stop_early": {"min_ratio": gate.min_ratio, "confidence": gate.confidence}}


def outlook(setting: Setting, *, estimate: Estimate | None = None, source: str | None = None) -> dict[str, Any]:
    """Return the forecast of the bench stage: its launches, prompts, tokens and seconds.

    `launches` counts those to measure, of both sides, and one discarded launch of the baseline. Each sends `prompts`,
    measured or not, of `prompt_tokens`, and asks for `output_tokens` at most; the discarded one sends only the
    discarded prompts. `noise` (relative, of the noisiest cell) and `ratio` (of the slowest) are those of the recipe's
    newest launches, as is the time. Without such launches they are None, and the time is that of `estimate`, with nine
    tenths of the longest prompts and answers; without `estimate` it is that of answers alone.

    `source` is the fingerprint of the baseline's weights, for which `reused` counts the stored launches that are reused
    if they agree (left out where there are none, or without `source`).
    """
    cells, measured = setting.workload.cells, _newest(setting)
    earlier = () if source is None else launches_to_reuse(setting, source, BenchStage.version)
    counted = 2 * setting.recipe.gate.throughput.launches - len(earlier)
    assumed_start = START_S if estimate is None else estimate.cached_start
    start = mean(launch.started_seconds for launch in measured) if measured else assumed_start
    discarded = full = 0.0  # seconds of a launch's prompts that do not count, and of those that do
    for cell in cells:
        speeds = [launch.cells[cell.name].output_throughput for launch in measured]
        if speeds:
            request = _answers(cell, 1) / harmonic_mean(speeds)
        elif estimate is not None:
            request = _request_seconds(cell, estimate)
        else:
            request = TOKEN_S * _answers(cell, 1) / cell.in_flight
        offered = 0.0 if cell.rate is None else cell.num_prompts / cell.rate
        discarded += cell.discarded * request
        full += max(offered, cell.num_prompts * request)
    sides = [
        [launch.cells[cell.name] for launch in measured if launch.side == side] for cell in cells for side in SIDES
    ]
    return {
        "launches": counted + 1,
        **({"stop_early": True} if setting.recipe.gate.throughput.stop_early else {}),
        **({"reused": len(earlier), "reused_from": earlier[-1].started} if earlier else {}),
        "prompts": sum(cell.num_prompts + cell.discarded for cell in cells),
        "prompt_tokens": sum(cell.input_len * (cell.num_prompts + cell.discarded) for cell in cells),
        "output_tokens": sum(_answers(cell, cell.num_prompts + cell.discarded) for cell in cells),
        "seconds": (counted + 1) * (start + discarded) + counted * full,
        "noise": max(map(noise, sides)) if measured else None,
        "ratio": min(_ratio(cell, measured) for cell in cells) if measured else None,
    }


def _request_seconds(cell: Cell, estimate: Estimate) -> float:
    """Return the seconds for prompt and answer of one request of mean length, with the cell's number in flight."""
    prompt, answer = _MEAN_LENGTH * cell.input_len, _MEAN_LENGTH * _answers(cell, 1)
    step = estimate.answer_step(cell.in_flight, prompt + answer / 2)
    return prompt * estimate.token + answer * step / cell.in_flight


def _answers(cell: Cell, prompts: int) -> int:
    return prompts * max(1, cell.longest - cell.input_len)


def _newest(setting: Setting) -> tuple[Launch, ...]:
    """Return the launches of the recipe's newest run that measured these cells; empty without such a run.

    A record that cannot be read counts as none.
    """
    for run in list_runs(setting.store.root):
        fingerprints = [
            fingerprint
            for stage, fingerprint in run.plan
            if stage == BenchStage.family and run.recipe == setting.recipe.name
        ]
        entry = setting.store.find(BenchStage.family, fingerprints[0]) if fingerprints else None
        launches: tuple[Launch, ...] = ()
        if entry is not None:
            with suppress(MeasurementError):
                launches = read_launches(entry.path)
        if launches and all(cell.name in launch.cells for launch in launches for cell in setting.workload.cells):
            return launches
    return ()


def read_launches(folder: Path) -> tuple[Launch, ...]:
    """Return the launches that a bench entry recorded, in the order in which they were made.

    Raises `MeasurementError` for a record that this version cannot read.
    """
    path = folder / LAUNCHES
    try:
        return tuple(Launch.from_json(launch) for launch in read_json(path)["launches"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeasurementError(f"{path}: not a record of launches: {error}") from error


def _ratio(cell: Cell, launches: Sequence[Launch]) -> float:
    """Return the candidate's median output throughput over the baseline's, in one cell."""
    medians = [
        median(launch.cells[cell.name].output_throughput for launch in launches if launch.side == side)
        for side in ("candidate", "baseline")
    ]
    return medians[0] / medians[1]
