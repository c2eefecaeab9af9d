"""Throughput and latency: curves over the load, ratios against what is promised, every launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantmint.eval.gate import GateReport
from quantmint.eval.measurements import Launch
from quantmint.eval.report.model import Report
from quantmint.eval.report.numbers import signed, tone
from quantmint.eval.report.plots import (
    PanelGrid,
    Row,
    at_values,
    both_widths,
    colour,
    forest,
    inline,
    panels,
    plain_ticks,
    plain_values,
    shorten,
    title,
)  # fmt: skip
from quantmint.eval.throughput import Throughput

_LOAD = re.compile(r"[-_](?:c|r|rate|conc)\d[\d.]*$")
LATENCIES = {"ttft": "Time to first token", "tpot": "Per further token", "itl": "Between tokens"}
_SIDES = ((0, "muted", "s"), (1, "candidate", "o"))  # index, colour and mark of the baseline and the candidate


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell with its load: the requests in flight, or with ``rate`` the requests per second that arrive.

    ``shape`` is the cell's name without its load.
    """

    cell: Throughput
    shape: str
    load: float
    rate: bool

    @property
    def speed(self) -> tuple[float, float]:
        """Return the output tokens/s per GPU of the baseline and of the candidate."""
        return self.cell.baseline / self.cell.gpus, self.cell.candidate / self.cell.gpus


def view(report: Report, gate: GateReport) -> dict[str, Any] | None:
    """Return the values of the template's throughput section; None if throughput was not measured."""
    if not gate.throughput:
        return None
    launches = [Launch.from_json(launch) for launch in report["launches"]]
    cells = [_measured(cell, launches) for cell in gate.throughput]
    gpus = max(cell.gpus for cell in gate.throughput)
    unit = "output tokens/s per GPU" if gpus > 1 else "output tokens/s"
    racing = [item for item in cells if not item.rate]
    return {
        "gpus": gpus,
        "unit": unit,
        "curves": both_widths(partial(_speeds, _groups(racing), unit=unit), "speed") if racing else None,
        "ratios": both_widths(partial(_ratios, gate, [item.cell for item in racing]), "ratio") if racing else None,
        "cells": cells,
        "latencies": [
            (group, both_widths(partial(_latencies, group, unit=unit), f"latency-{at}"))
            for at, group in enumerate(_groups(cells))
        ],
        "fields": [("ttft", "First token"), ("tpot", "Per further token"), ("itl", "Between tokens"),
                   ("e2el", "Whole request")],
        "goodput": any(cell.goodput for cell in gate.throughput),
        "launches": launches,
        "machine": any(launch.machine.samples for launch in launches),
    }  # fmt: skip


def _measured(cell: Throughput, launches: Sequence[Launch]) -> Measured:
    found = next(launch.cells[cell.cell] for launch in launches if cell.cell in launch.cells)
    shape = _LOAD.sub("", cell.cell)
    if found.request_rate is not None:
        return Measured(cell, shape, found.request_rate, True)
    return Measured(cell, shape, float(found.concurrency or found.completed), False)  # all at once, or so many


def _groups(cells: Sequence[Measured]) -> list[list[Measured]]:
    """Return the cells grouped by shape and kind of load, each group by rising load."""
    measured: dict[tuple[str, bool], list[Measured]] = {}
    for item in cells:
        measured.setdefault((item.shape, item.rate), []).append(item)
    return [sorted(group, key=lambda item: item.load) for group in measured.values()]


def _ratios(gate: GateReport, cells: Sequence[Throughput], *, width: int, name: str) -> str:
    rows = []
    for cell in cells:
        promise = cell.promise if cell.promise is not None else gate.policy.min_ratio
        rows.append(
            Row(
                label=cell.cell,
                tail="shown only" if promise is None else f"promised {signed(100 * (promise - 1), 0)} %",
                value=100 * (cell.ratio - 1),
                interval=(100 * (cell.ratio_low - 1), 100 * (cell.ratio_high - 1)),
                limit=None if promise is None else 100 * (promise - 1),
                tone=tone(gate.verdict_of("throughput", cell.cell)),
            )
        )
    label = "; ".join(f"{row.label}: {signed(row.value, 1)} %" for row in rows)
    return forest(rows, axis_label="change in output tokens/s, %", label=f"Change in throughput. {label}", width=width,
                  name=name, least_span=4.0)  # fmt: skip


def _speeds(shapes: Sequence[Sequence[Measured]], *, unit: str, width: int, name: str) -> str:
    """Draw output tokens/s against the load, as an inline SVG with a panel per shape of request.

    Each launch is a dot; lines join the medians.
    """
    columns = 1 if width < 500 or len(shapes) == 1 else 2
    grid = PanelGrid(width, columns, len(shapes), 230, left=62, right=16, top=30 if len(shapes) > 1 else 12)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        for axis, group in zip(grid.place(axes), shapes, strict=False):
            loads = [item.load for item in group]
            axis.set_xscale("log", base=2)
            axis.set_xlim(min(loads) / 1.45, max(loads) * 1.45)
            for side, ink, marker in _SIDES:
                axis.plot(loads, [item.speed[side] for item in group], color=colour(ink), linewidth=2, zorder=2)
                for item in group:
                    values = [
                        value / item.cell.gpus
                        for value in (item.cell.values_baseline, item.cell.values_candidate)[side]
                    ]
                    axis.plot([item.load] * len(values), values, linestyle="none", marker=marker, markersize=6.5,
                              color=colour(ink), alpha=0.8, markeredgecolor=colour("paper"), markeredgewidth=0.8,
                              zorder=3)  # fmt: skip
            axis.set_ylim(0, 1.12 * max(max(item.speed) for item in group))
            at_values(axis, loads, width / columns - grid.left - grid.right)
            plain_ticks(axis, y=5)
            axis.grid(axis="y")
            axis.set_xlabel("requests in flight")
            axis.set_ylabel(unit)
            if len(shapes) > 1:
                title(axis, shorten(group[0].shape, width / columns, 14), left=grid.left)
        label = "; ".join(
            f"{item.cell.cell}: {item.speed[0]:,.0f} to {item.speed[1]:,.0f}" for group in shapes for item in group
        )
        return inline(drawing, name=name, label=f"{unit} against the load. {label}")


def _latencies(group: Sequence[Measured], *, unit: str, width: int, name: str) -> str:
    """Draw the latencies of each request against the load, as an inline SVG with a panel per latency.

    A solid line is the median, a dashed one the 99th percentile.
    """
    columns = 1 if width < 500 else min(3, len(LATENCIES))
    grid = PanelGrid(width, columns, len(LATENCIES), 170, left=50, right=18, top=34)
    sentences = []
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        for axis, (field, words) in zip(grid.place(axes), LATENCIES.items(), strict=False):
            _panel(axis, group, field)
            axis.set_xlabel("requests/s offered" if group[0].rate else unit)
            title(axis, words, left=grid.left)
            ends = [
                ", ".join("{:.3g} to {:.3g}".format(*item.cell.latency[f"{field}_{which}"]) for item in group)
                for which in ("p50", "p99")
            ]
            sentences.append(f"{words}: median {ends[0]}, 99th percentile {ends[1]}")
        return inline(drawing, name=name, label=f"Latency in ms, baseline to candidate. {'; '.join(sentences)}")


def _panel(axis: Any, group: Sequence[Measured], field: str) -> None:
    """Draw one latency with its intervals against output tokens/s, or against the offered requests/s.

    ``field`` is the name of a field of `CellResult` without its percentile, such as "ttft".
    """
    values: list[float] = []
    fastest = 0.0
    for side, ink, marker in _SIDES:
        speed = [item.load if item.rate else item.speed[side] for item in group]
        fastest = max(fastest, *speed)
        for which, style, alpha in (("p50", "-", 1.0), ("p99", (0, (4, 2)), 0.85)):
            for x, item in zip(speed, group, strict=True):
                span = item.cell.latency_intervals.get(f"{field}_{which}")
                if span is not None:
                    values += span[side]
                    axis.plot([x, x], span[side], color=colour(ink), linewidth=3.5, alpha=0.35, solid_capstyle="butt")
            middle = [item.cell.latency[f"{field}_{which}"][side] for item in group]
            values += middle
            axis.plot(speed, middle, linestyle=style, color=colour(ink), linewidth=1.8, marker=marker, markersize=6,
                      markeredgecolor=colour("paper"), markeredgewidth=0.8, alpha=alpha)  # fmt: skip
    axis.set_xlim(0, 1.08 * fastest)
    plain_values(axis, values, 4)
    plain_ticks(axis, x=3)
    axis.grid(axis="y")
    axis.set_ylabel("ms", labelpad=2)
