"""The report of a sweep: `tuning.json`, and `tuning.html`, one page without scripts or external files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import yaml

from quantmint.eval.report.page import environment
from quantmint.eval.report.plots import WIDE, Spot, both_widths, plane
from quantmint.pipeline.serving.plan import Process
from quantmint.pipeline.serving.render.invocation import command
from quantmint.pipeline.serving.tuning.space import BASE, TUNABLEOP, Point, Value, change_label, gated, label
from quantmint.pipeline.serving.tuning.subject import TunedKernels, device_name
from quantmint.pipeline.serving.tuning.sweep import KnobSweep, Objective, frontier
from quantmint.pipeline.serving.tuning.trials import Budget
from quantmint.pipeline.store.disk import write_atomic


class ReportedChange(TypedDict):
    """One change of a point; ``gated`` knobs change the model's answers."""

    knob: str
    value: Value
    label: str
    gated: bool


class ReportedPoint(TypedDict):
    """A point with medians over its ``runs`` sound launches, by cell, and ``ratios`` to the base plan.

    ``number`` is its mark in the plots, 0 for the base plan; ``score`` is None when a limit is broken.
    """

    number: int
    label: str
    changes: list[ReportedChange]
    runs: int
    status: str
    why: str | None
    fix: str | None
    cells: dict[str, dict[str, float]]
    ratios: dict[str, float]
    score: float | None
    seconds: float
    started_seconds: float | None
    kv_tokens: int | None
    attention_backend: str | None
    notes: list[str]


class ReportedStanding(TypedDict):
    """A finalist's comparison with the base plan in the contest; ratios are of the score."""

    number: int
    label: str
    p: float
    ratio: float
    low: float
    high: float
    launches: list[int]
    better: bool


class BasePlan(TypedDict):
    """The base plan's variables and arguments."""

    env: dict[str, str]
    argv: list[str]


class ReportedKernels(TypedDict):
    """TunableOp's kernels: the digest of their files, and tuned shapes by device number."""

    digest: str
    shapes: dict[str, int]


class TuningReport(TypedDict):
    """The contents of `tuning.json`.

    Throughputs are output tokens per second of one server, latencies are in ms, ``noise`` is a factor. ``best`` is the
    number of the recommended point. ``undecided`` are sentences about points that the contest could not tell apart,
    ``gate_again`` recommended changes that the gate must judge, ``refused`` the planner's reasons by point.
    """

    name: str
    created: str
    target: str
    kind: str
    device: str
    vllm: str
    workload: str
    cells: list[dict[str, Any]]
    gpus: int
    replicas: int
    mode: str
    repeat: int
    objective: dict[str, Any]
    budget: dict[str, float | None]
    sweep: str
    base: BasePlan
    noise: dict[str, float] | None
    score_noise: float
    points: list[ReportedPoint]
    best: int | None
    verdict: str
    contest: list[ReportedStanding]
    undecided: list[str]
    gate_again: list[str]
    not_tried: list[str]
    refused: dict[str, str]
    notes: list[str]
    tunableop: ReportedKernels | None
    serve: dict[str, Any] | None
    serve_yaml: str | None


def report(
    sweep: KnobSweep, budget: Budget, *, created: str, existing: dict[str, Any], tunableop: str | None
) -> TuningReport:
    """Return the report of a sweep.

    ``existing`` is the recipe's serve section, ``tunableop`` the path of the kernels for the recommended one.
    """
    subject = sweep.subject
    base = subject.plan(BASE)
    best = sweep.best()
    points = _points(sweep)
    numbers = {point: index for index, point in enumerate(sweep.by_point())}
    serve = None if best is None else serve_section(best, existing, tunableop)
    return TuningReport(
        name=subject.name,
        created=created,
        target=subject.target,
        kind=subject.kind,
        device=device_name(dict(subject.machine)),
        vllm=subject.vllm.version,
        workload=subject.workload.name,
        cells=[cell.to_json() for cell in subject.cells],
        gpus=base.layout.gpus,
        replicas=base.layout.replicas,
        mode=sweep.design.mode,
        repeat=sweep.design.repeat,
        objective=asdict(sweep.objective),
        budget={"seconds": budget.seconds, "spent": round(budget.spent, 1)},
        sweep=sweep.id,
        base={"env": dict(base.env), "argv": list(base.argv)},
        noise=sweep.noise(),
        score_noise=sweep.score_noise(),
        points=points,
        best=None if best is None else numbers[best],
        verdict=_verdict(sweep, best),
        contest=_contest(sweep, numbers),
        undecided=[] if best is None else list(_undecided(sweep, best)),
        gate_again=[change_label(knob, value) for knob, value in best or () if knob in gated()],
        not_tried=[label(point) for point in sweep.not_tried],
        refused={label(point): why for point, why in sweep.refused.items()},
        notes=_notes(sweep),
        tunableop=None if subject.tuned is None else _kernels(subject.tuned),
        serve=serve,
        serve_yaml=None if serve is None else serve_yaml(serve),
    )


def _kernels(tuned: TunedKernels) -> ReportedKernels:
    return {"digest": tuned.digest, "shapes": dict(tuned.shapes)}


def _points(sweep: KnobSweep) -> list[ReportedPoint]:
    measured = sweep.points()
    points: list[ReportedPoint] = []
    for number, (point, runs) in enumerate(sweep.by_point().items()):
        sound = [run for run in runs if run.status == "ok"]
        failed = next((run for run in runs if run.status != "ok"), None)
        first = sound[0] if sound else runs[0]
        points.append(
            {
                "number": number,
                "label": label(point),
                "changes": [
                    {"knob": knob, "value": value, "label": change_label(knob, value), "gated": knob in gated()}
                    for knob, value in point
                ],
                "runs": len(sound),
                "status": first.status,
                "why": None if failed is None else failed.why,
                "fix": None if failed is None else failed.fix,
                "cells": {cell: dict(row) for cell, row in measured[point].items()} if sound else {},
                "ratios": sweep.ratios(point) or {},
                "score": sweep.score(point),
                "seconds": sum(run.seconds for run in runs),
                "started_seconds": median(run.started_seconds or 0.0 for run in sound) if sound else None,
                "kv_tokens": first.kv_tokens,
                "attention_backend": first.attention_backend,
                "notes": list(dict.fromkeys(note for run in runs for note in run.notes)),
            }
        )
    return points


def _verdict(sweep: KnobSweep, best: Point | None) -> str:
    limits = _limits(sweep.objective)
    if best is None:
        return f"No measured plan keeps {limits}." if limits else "Nothing could be measured."
    if best == BASE:
        return "No plan that was tried beats the base plan by more than the noise: keep the base plan."
    standing = sweep.standings().get(best)
    if standing is None:
        score, relative = sweep.score(best) or 1.0, sweep.ratios(best) or {}
        change = percent(relative["output_throughput"] if sweep.objective.goal == "throughput" else 1 / score)
        return f"{change} {_GOALS[sweep.objective.goal]} against the base plan; the base plan does not keep {limits}."
    gain, minimum = (_gain(sweep.objective, ratio) for ratio in (standing.ratio, standing.low))
    proof = f"{minimum} at least; {_launches(standing.launches)} by turns, p = {standing.p:.2g}"
    return f"{gain} {_GOALS[sweep.objective.goal]} against the base plan ({proof})."


_GOALS = {
    "throughput": "output tokens/s",
    "latency": "latency (time to first token and between tokens, 99th percentile)",
}


def _gain(objective: Objective, ratio: float) -> str:
    """Return a ratio of scores as a change of throughput or latency; latencies fall when scores rise."""
    return percent(ratio if objective.goal == "throughput" else 1 / ratio)


def _launches(counts: tuple[int, int]) -> str:
    base, point = counts
    return f"{base} launches each" if base == point else f"{base} launches of the base plan and {point} of it"


def _contest(sweep: KnobSweep, numbers: Mapping[Point, int]) -> list[ReportedStanding]:
    return [
        {
            "number": numbers[point],
            "label": label(point),
            "p": standing.p,
            "ratio": standing.ratio,
            "low": standing.low,
            "high": standing.high,
            "launches": list(standing.launches),
            "better": standing.better,
        }
        for point, standing in sweep.standings().items()
    ]


def _undecided(sweep: KnobSweep, best: Point) -> Iterator[str]:
    """Yield sentences about points that are not proven different from ``best``, and about points without a contest."""
    standings = sweep.standings()
    for point in sweep.equals(best):
        standing = standings[point]
        interval = f"{_gain(sweep.objective, standing.low)} to {_gain(sweep.objective, standing.high)}"
        comparison = f"{interval} against the base plan, {_launches(standing.launches)}, p = {standing.p:.2g}"
        yield f"{label(point)} cannot be told apart from {label(best)}: {comparison}."
    contested = set() if sweep.contest is None else set(sweep.contest.points)
    screened = [point for point in sweep.points() if point and point not in contested]
    if screened and sweep.score(BASE) is not None:
        names = "; ".join(label(point) for point in screened)
        yield f"Screened only, by too few launches to tell a small gain or loss from none: {names}."


def percent(value: float) -> str:
    """Return a ratio as a change in percent: "+12.3 %"; negative changes have a real minus sign."""
    return f"{100 * (value - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")


def _limits(objective: Objective) -> str:
    limits = [
        f"a {name} of {limit:g} ms at the 99th percentile"
        for name, limit in (("time to first token", objective.max_ttft), ("gap between tokens", objective.max_itl))
        if limit is not None
    ]
    return " and ".join(limits)


def _notes(sweep: KnobSweep) -> list[str]:
    kind, layout, notes = sweep.subject.kind, sweep.subject.plan(BASE).layout, []
    if kind != "rocm":
        device = {"cpu": "a CPU", "cuda": "an NVIDIA GPU"}[kind]
        notes.append(f"Measured on {device}: the best knobs may differ with ROCm's kernels.")
    if layout.replicas * layout.packed > 1:
        notes.append(
            f"The plan has {layout.replicas * layout.packed} servers; one was measured, with a replica's share of the"
            " requests in flight."
        )
    return notes


def serve_section(point: Point, existing: Mapping[str, Any], tunableop: str | None) -> dict[str, Any]:
    """Return a recipe's serve section, ``existing``, with a point's changes; ``tunableop`` is the kernels' path."""
    knobs = {**existing.get("knobs", {}), **{knob: _yaml_value(value) for knob, value in point if knob != TUNABLEOP}}
    section = {**existing, "knobs": knobs}
    if tunableop is not None and any(knob == TUNABLEOP for knob, _ in point):
        section["tunableop"] = tunableop
    return section


def serve_yaml(section: Mapping[str, Any]) -> str:
    """Return a serve section as YAML to paste into a recipe; it begins with ``serve:``."""
    return yaml.safe_dump({"serve": dict(section)}, sort_keys=False, allow_unicode=True, width=10_000)


def _yaml_value(value: Value) -> Value | int:
    """Return whole numbers as integers, so that YAML has them without quotes."""
    return int(value) if isinstance(value, str) and value.isdecimal() and str(int(value)) == value else value


PAGE, DATA = "tuning.html", "tuning.json"
TITLES = {
    "ttft_p99": "time to first token, 99th percentile, ms",
    "itl_p99": "gap between tokens, 99th percentile, ms",
    "itl_p50": "median gap between tokens, ms",
}
SHORT = {
    "output_throughput": "tokens/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
}


def write(folder: Path, report: TuningReport) -> Path:
    """Write `tuning.json` and `tuning.html` into ``folder``; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, text in ((DATA, data), (PAGE, render(report))):
        write_atomic(folder / name, text.encode(), temporary=folder / f"{name}.partial")
    return folder / PAGE


def render(report: TuningReport) -> str:
    """Return the page as HTML."""
    templates = environment(Path(__file__).parent)
    templates.filters["change"] = percent
    points, base_plan = report["points"], report["base"]
    return templates.get_template("page.html.j2").render(
        report=report,
        base=points[0] if points else None,
        best=None if report["best"] is None else points[report["best"]],
        cells=[(cell, _plots(report, cell["name"], index)) for index, cell in enumerate(report["cells"])],
        bad=[point for point in points if point["status"] != "ok"],
        compared=tuple(SHORT),
        short=SHORT,
        command=command(Process(0, "server", 0, (), None, base_plan["env"], tuple(base_plan["argv"]))),
    )


def _plots(report: TuningReport, cell: str, index: int) -> dict[str, Any]:
    plots = {}
    if any(point["status"] == "ok" for point in report["points"]):
        for name in TITLES:
            wide = WIDE if name == "ttft_p99" else (WIDE - 32) // 2
            plots[name] = both_widths(partial(pareto, report, cell, name), f"c{index}-{name}", wide=wide)
    return plots


def pareto(report: TuningReport, cell: str, latency: str, *, width: int, name: str) -> str:
    """Return an inline SVG of throughput over a latency: one numbered mark a point, and the Pareto frontier."""
    points = [point for point in report["points"] if point["status"] == "ok"]
    positions = [(point["cells"][cell][latency], point["cells"][cell]["output_throughput"]) for point in points]
    optimal = set(frontier([(y, x) for x, y in positions]))
    spots = []
    for index, (point, (x, y)) in enumerate(zip(points, positions, strict=True)):
        base, best = point["number"] == 0, point["number"] == report["best"]
        tone = "pass" if best else "ink" if base else "candidate" if index in optimal else "muted"
        spots.append(Spot("B" if base else str(point["number"]), x, y, tone, index in optimal))
    least = (0.04 * max(x for x, _ in positions), 0.04 * max(y for _, y in positions))
    return plane(spots, titles=(TITLES[latency], "output tokens/s"), least=least, stairs=True, width=width, name=name)
