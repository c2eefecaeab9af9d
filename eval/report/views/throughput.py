"""Throughput and latency: curves over the load, ratios against what is promised, every launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.bench import CellResult, Launch
from eval.gate import GateReport
from eval.report.model import Report
from eval.report.numbers import signed
from eval.report.plots.forest import Row, Span, forest
from eval.report.plots.latency import Line, lines
from eval.report.plots.speed import Curve, Point, curves
from eval.report.views import drawn
from eval.report.views.accuracy import tone
from eval.throughput import Throughput

_LOAD = re.compile(r"[-_](?:c|r|rate|conc)\d[\d.]*$")
LATENCIES = {"ttft": "Time to first token", "tpot": "Per further token", "itl": "Between tokens"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell with its load: how many requests were in flight (``rate`` False), or arrived each second."""

    cell: Throughput
    shape: str
    load: float
    rate: bool


def view(report: Report, gate: GateReport) -> dict[str, Any] | None:
    """The section's content; None where nothing was measured."""
    if not gate.throughput:
        return None
    launches = [Launch.from_json(launch) for launch in report["launches"]]
    cells = [_measured(cell, launches) for cell in gate.throughput]
    gpus = max(cell.gpus for cell in gate.throughput)
    unit = "output tokens/s per GPU" if gpus > 1 else "output tokens/s"
    racing = [item for item in cells if not item.rate]
    shapes = [_curve(group) for group in _groups(racing)]
    return {
        "gpus": gpus,
        "unit": unit,
        "curves": drawn(partial(curves, shapes, unit=unit), "speed") if shapes else None,
        "ratios": drawn(partial(_ratios, gate, [item.cell for item in racing]), "ratio") if racing else None,
        "rows": [
            {
                "item": item,
                "verdict": gate.verdict_of("throughput", item.cell.cell),
                "shown": item.rate,
                "p": _p_value(item.cell),
            }
            for item in cells
        ],
        "latencies": [_latency(group, unit, f"latency-{index}") for index, group in enumerate(_groups(cells))],
        "backing": _backing(gate.throughput),
        "fields": [("ttft", "First token"), ("tpot", "Per further token"), ("itl", "Between tokens"),
                   ("e2el", "Whole request")],
        "goodput": any(cell.goodput for cell in gate.throughput),
        "peaks": any(cell.peak_concurrency for cell in gate.throughput),
        "launches": launches,
        "machine": any(launch.machine.samples for launch in launches),
    }  # fmt: skip


def _p_value(cell: Throughput) -> float | None:
    """That the candidate is faster; where a slower one was promised, that it is no slower than that."""
    return cell.p_faster if cell.promise is None or cell.promise > 1 else cell.p_promise


def _latency(group: Sequence[Measured], unit: str, name: str) -> dict[str, Any]:
    """The latencies of one shape of request over its loads."""
    x_title = "requests/s offered" if group[0].rate else unit
    return {
        "shape": group[0].shape,
        "loads": [f"{item.load:g}" for item in group],
        "rate": group[0].rate,
        "plot": drawn(partial(lines, _lines(group), unit=x_title), name),
    }


def _backing(cells: Sequence[Throughput]) -> str:
    """How many launches stand behind a figure."""
    before, after = cells[0].launches
    return f"{before} {'launch' if before == 1 else 'launches'} a side" if before == after else f"{before} and {after}"


def _measured(cell: Throughput, launches: Sequence[Launch]) -> Measured:
    found: CellResult | None = next((launch.cells[cell.cell] for launch in launches if cell.cell in launch.cells), None)
    shape = _LOAD.sub("", cell.cell)
    if found is not None and found.request_rate is not None:
        return Measured(cell, shape, found.request_rate, True)
    if found is not None and found.concurrency is None:  # all at once
        return Measured(cell, shape, float(found.completed), False)
    return Measured(cell, shape, float(found.concurrency or 1) if found is not None else 1.0, False)


def _groups(cells: Sequence[Measured]) -> list[list[Measured]]:
    """Cells of one shape and kind of load together, by rising load, in the order of the workload."""
    found: dict[tuple[str, bool], list[Measured]] = {}
    for item in cells:
        found.setdefault((item.shape, item.rate), []).append(item)
    return [sorted(group, key=lambda item: item.load) for group in found.values()]


def _curve(group: Sequence[Measured]) -> Curve:
    points = tuple(
        Point(
            item.cell.cell,
            item.load,
            (
                tuple(value / item.cell.gpus for value in item.cell.values_baseline),
                tuple(value / item.cell.gpus for value in item.cell.values_candidate),
            ),
            (item.cell.baseline / item.cell.gpus, item.cell.candidate / item.cell.gpus),
        )
        for item in group
    )
    return Curve(group[0].shape, "requests in flight", points)


def _lines(group: Sequence[Measured]) -> list[Line]:
    speed = tuple(
        (item.load, item.load)
        if item.rate
        else (item.cell.baseline / item.cell.gpus, item.cell.candidate / item.cell.gpus)
        for item in group
    )
    return [
        Line(
            title,
            speed,
            tuple((item.cell.latency[f"{name}_p50"][0], item.cell.latency[f"{name}_p50"][1]) for item in group),
            tuple((item.cell.latency[f"{name}_p99"][0], item.cell.latency[f"{name}_p99"][1]) for item in group),
            (_spans(group, f"{name}_p50"), _spans(group, f"{name}_p99")),
        )
        for name, title in LATENCIES.items()
    ]


def _spans(group: Sequence[Measured], field: str) -> tuple[tuple[Span, Span], ...]:
    """Both sides' intervals of a latency in each cell; none where a cell has none."""
    found = [item.cell.latency_intervals.get(field) for item in group]
    return tuple(span for span in found if span is not None) if None not in found else ()


def _ratios(gate: GateReport, cells: Sequence[Throughput], *, width: int, name: str) -> str:
    rows = []
    for cell in cells:
        promise = cell.promise if cell.promise is not None else gate.policy.min_ratio
        tail = "shown only" if promise is None else f"promised {signed(100 * (promise - 1), 0)} %"
        rows.append(
            Row(
                label=cell.cell,
                tail=tail,
                value=100 * (cell.ratio - 1),
                bounds=None,
                interval=(100 * (cell.ratio_low - 1), 100 * (cell.ratio_high - 1)),
                bootstrap=None,
                limit=None if promise is None else 100 * (promise - 1),
                tone=tone(gate.verdict_of("throughput", cell.cell)),
            )
        )
    label = "; ".join(f"{row.label}: {signed(row.value, 1)} %" for row in rows)
    return forest(rows, axis_label="change in output tokens/s, %", label=f"Change in throughput. {label}", width=width,
                  name=name, least_span=4.0)  # fmt: skip
