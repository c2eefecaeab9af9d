"""Long texts: the change of the likelihood and the KL by position, and the needles found by depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quantmint.eval.accuracy import Accuracy, change
from quantmint.eval.gate import GateReport
from quantmint.eval.long_context import LIKELIHOOD, RETRIEVAL, LongBucket, LongDepth, LongReport, likelihood_task
from quantmint.eval.report.numbers import figure as words
from quantmint.eval.report.plots import (
    PanelGrid,
    Span,
    both_widths,
    colour,
    inline,
    number,
    panels,
    plain_ticks,
    title,
)  # fmt: skip


def view(gate: GateReport) -> dict[str, Any] | None:
    """Return the values of the template's section on long texts; None if none was read."""
    if gate.long is None:
        return None
    results = {result.task: result for result in gate.accuracy}
    likelihoods = [results.get(likelihood_task(bucket.end)) for bucket in gate.long.buckets]
    tasks = [task for task in results if task.startswith(f"{LIKELIHOOD}_to_")]
    margin = next((gate.policy.margins[task] for task in tasks if task in gate.policy.margins), None)
    drawing = partial(by_position, gate.long, likelihoods, margin, gate.policy.long_kl)
    return {
        "figure": both_widths(drawing, "long") if gate.long.buckets else None,
        "rows": list(zip(gate.long.buckets, likelihoods, strict=True)),
        "likeliest": gate.long.likeliest,
        "texts": max((bucket.texts for bucket in gate.long.buckets), default=0),
        "depths": gate.long.depths,
        "retrieval": results.get(RETRIEVAL),
    }


def by_position(
    long: LongReport,
    likelihoods: Sequence[Accuracy | None],
    margin: float | None,
    max_kl: float | None,
    *,
    width: int,
    name: str,
) -> str:
    """Draw the change of the perplexity, the KL and the needles found, each over the position, as an inline SVG.

    Buckets are equally wide, since each is twice as long as the one before. Intervals are one-sided bounds each.
    """
    rows = [(bucket, result) for bucket, result in zip(long.buckets, likelihoods, strict=True) if result is not None]
    changes = [(change(r.kind, r.difference), (change(r.kind, r.upper), change(r.kind, r.lower))) for _, r in rows]
    divergences = [(bucket.kl, (bucket.lower, bucket.upper)) for bucket in long.buckets]
    kinds = [*(["change"] if rows else []), "kl", *(["found"] if long.depths else [])]
    grid = PanelGrid(width, len(kinds) if width > 500 else 1, len(kinds), 190)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        for axis, kind in zip(grid.place(axes), kinds, strict=False):
            if kind == "change":
                title(axis, "Perplexity, % more", left=grid.left)
                limit = None if margin is None else 100 * margin
                _spans(axis, [bucket for bucket, _ in rows], changes, limit)
            elif kind == "kl":
                title(axis, "KL at least, nats", left=grid.left)
                _spans(axis, long.buckets, divergences, max_kl)
            else:
                title(axis, "Needles found, %", left=grid.left)
                _by_depth(axis, long.depths)
        label = "; ".join(
            f"to position {bucket.end}: {_rise(result)}KL {words(bucket.kl)}"
            for bucket, result in zip(long.buckets, likelihoods, strict=True)
        )
        return inline(drawing, name=name, label=f"Long texts by position. {label}")


def _rise(result: Accuracy | None) -> str:
    return "" if result is None else f"perplexity {change(result.kind, result.difference):+.2f} %, "


def _spans(axis: Any, buckets: Sequence[LongBucket], values: Sequence[tuple[float, Span]], limit: float | None) -> None:
    """Draw a point with its bounds for each bucket; the side beyond the limit is shaded."""
    highs = [high for _, (_, high) in values] + ([] if limit is None else [limit])
    lows = [low for _, (low, _) in values]
    room = max(max(highs) - min(0.0, *lows), 1e-9)
    axis.set_ylim(min(0.0, *lows) - 0.08 * room, max(highs) + 0.12 * room)
    axis.set_xlim(-0.5, len(buckets) - 0.5)
    if limit is not None:
        axis.axhspan(limit, axis.get_ylim()[1], color=colour("fail"), alpha=0.1, linewidth=0)
        axis.axhline(limit, color=colour("fail"), linewidth=1.5)
    axis.axhline(0, color=colour("muted"), linewidth=1)
    ink = colour("candidate")
    axis.plot(range(len(values)), [value for value, _ in values], color=ink, linewidth=1.2, alpha=0.5)
    for place, (value, span) in enumerate(values):
        axis.plot([place, place], span, color=ink, linewidth=5, solid_capstyle="butt", alpha=0.4)
        axis.plot([place], [value], "o", color=ink, markersize=7, markeredgecolor=colour("paper"), markeredgewidth=1.2)
    _ticks(axis, [_short(bucket.end) for bucket in buckets], "up to position")


def _by_depth(axis: Any, depths: Sequence[LongDepth]) -> None:
    """Draw the share of needles that each side found, by their depth in the text."""
    axis.set_ylim(-4, 108)
    axis.set_xlim(-0.5, len(depths) - 0.5)
    for side, dashes, mark, height in (
        ("baseline", (0, (3, 2)), "\N{EN DASH} \N{EN DASH} baseline", 0.22),
        ("candidate", "solid", "\N{EM DASH} candidate", 0.1),
    ):
        shares = [100 * getattr(depth, side) / max(depth.items, 1) for depth in depths]
        axis.plot(
            range(len(shares)), shares, marker="o", color=colour(side), linestyle=dashes, linewidth=1.6, markersize=5
        )
        ink = colour("muted" if side == "baseline" else side)
        axis.annotate(mark, (0.04, height), xycoords="axes fraction", va="center", fontsize=11, color=ink)
    _ticks(axis, [f"{depth.depth:.0%}" for depth in depths], "depth in the text")


def _ticks(axis: Any, labels: Sequence[str], caption: str) -> None:
    axis.grid(axis="y")
    plain_ticks(axis, y=4)
    step = max(1, -(-len(labels) // 6))
    shown = range(len(labels) - 1, -1, -step)
    axis.set_xticks(list(shown), [labels[place] for place in shown])
    axis.set_xlabel(caption)


def _short(position: int) -> str:
    """Return a position as text: 8192 is 8k, 511 is 511."""
    thousands = (position + 1) / 1024
    return f"{round(thousands)}k" if position >= 1024 and abs(thousands - round(thousands)) < 0.01 else number(position)
