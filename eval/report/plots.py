"""The report's plots, each drawn for a given width so that text keeps its size on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.accuracy import Accuracy
from eval.report.model import LayerError
from eval.report.svg import colour, figure, inline, series
from eval.verdict import Verdict

_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p")


def forest(
    results: Sequence[Accuracy],
    margins: Mapping[str, float],
    verdicts: Mapping[str, Verdict | None],
    *,
    width: int,
    name: str,
) -> str:
    """Change in accuracy per task in points, with its bounds, against the margin where the task decides.

    The thick bar spans the two one-sided bounds that the gate reads, the thin one the two-sided interval.
    """
    row, top, bottom = 54, 8, 44
    height = top + bottom + row * len(results)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=0, right=1, top=1 - top / height, bottom=bottom / height)
        lows = [min(100 * r.interval_low, -100 * margins.get(r.task, 0)) for r in results]
        low, high = min([*lows, -0.2]), max([100 * r.interval_high for r in results] + [0.2])
        pad = 0.08 * (high - low)
        axis.set_xlim(low - pad, high + pad)
        axis.set_ylim(len(results), 0)
        axis.axvline(0, color=colour("muted"), linewidth=1)
        for index, result in enumerate(results):
            y = index + 0.66
            verdict = verdicts.get(result.task)
            ink = colour(verdict.value.lower()) if verdict else colour("muted")
            margin = margins.get(result.task)
            if margin is not None:
                axis.fill_betweenx([index + 0.40, index + 0.92], low - pad, -100 * margin, color=colour("fail"),
                                   alpha=0.09, linewidth=0)  # fmt: skip
                axis.plot([-100 * margin] * 2, [index + 0.40, index + 0.92], color=colour("fail"), linewidth=1.5)
            axis.plot([100 * result.interval_low, 100 * result.interval_high], [y, y], color=ink, linewidth=1.5)
            axis.plot([100 * result.lower, 100 * result.upper], [y, y], color=ink, linewidth=5,
                      solid_capstyle="butt", alpha=0.45)  # fmt: skip
            axis.plot([100 * result.difference], [y], "o", color=ink, markersize=8, markeredgecolor=colour("paper"),
                      markeredgewidth=1.5)  # fmt: skip
            axis.annotate(result.task, (0, y), (0, 19), xycoords=("axes fraction", "data"), color=colour("ink"),
                          textcoords="offset points", fontsize=13, fontweight="bold", va="center")  # fmt: skip
            tail = f"margin {100 * margin:.1f} points" if margin is not None else "shown only"
            axis.annotate(tail, (1, y), (0, 19), xycoords=("axes fraction", "data"), color=colour("muted"),
                          textcoords="offset points", fontsize=12, ha="right", va="center",
                          bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        axis.set_xlabel("change in accuracy, points")
        label = "; ".join(f"{r.task}: {100 * r.difference:+.2f} points" for r in results)
        return inline(drawing, name=name, label=f"Change in accuracy. {label}", css_class="plot")


def bars(rows: Sequence[tuple[str, float, float]], *, unit: str, lower_is_better: bool, width: int, name: str) -> str:
    """Baseline over candidate for each (cell, baseline, candidate), with values and the relative change."""
    row, bottom = 72, 40
    height = 4 + bottom + row * len(rows)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=0, right=1, top=1 - 4 / height, bottom=bottom / height)
        top = max([max(before, after) for _, before, after in rows] + [1e-9])
        # Room for the value behind the longest bar: text has a fixed width, whatever the plot's.
        axis.set_xlim(0, top * (1 + 150 / (width - 150)))
        axis.set_ylim(len(rows), 0)
        for index, (cell, before, after) in enumerate(rows):
            better = after <= before if lower_is_better else after >= before
            axis.annotate(cell, (0, index + 0.16), (0, 0), textcoords="offset points", fontsize=13, fontweight="bold",
                          va="center", color=colour("ink"))  # fmt: skip
            for offset, value, ink in ((0.43, before, "baseline"), (0.73, after, "candidate")):
                axis.barh(index + offset, value, height=0.24, color=colour(ink), linewidth=0)
                text = _number(value)
                axis.annotate(text, (value, index + offset), (6, 0), textcoords="offset points", va="center",
                              color=colour("ink" if ink == "candidate" else "muted"), fontsize=12)  # fmt: skip
            change = f"{after / before - 1:+.1%}".replace("-", "\N{MINUS SIGN}") if before else ""
            axis.annotate(change, (1, index + 0.73), (0, 0), xycoords=("axes fraction", "data"), ha="right",
                          textcoords="offset points", va="center", fontsize=12, fontweight="bold",
                          color=colour("pass" if better else "fail"))  # fmt: skip
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        axis.xaxis.set_major_locator(_locator(4))
        axis.xaxis.set_major_formatter(lambda value, _: _number(value))
        axis.set_xlabel(unit)
        label = "; ".join(f"{cell}: {before:.4g} to {after:.4g}" for cell, before, after in rows)
        return inline(drawing, name=name, label=f"{unit}. {label}", css_class="plot")


def layers(errors: Sequence[LayerError], *, width: int, name: str) -> str:
    """SQNR in dB of each quantized linear by layer, one mark and colour per kind of linear."""
    kinds = list(dict.fromkeys(error["kind"] for error in errors))
    columns = max(1, min(len(kinds), width // 105))
    legend = 24 * -(-len(kinds) // columns)
    bottom, height = 42, 270 + legend
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=46 / width, right=1 - 8 / width, bottom=bottom / height,
                                top=1 - (legend + 10) / height)  # fmt: skip
        for index, kind in enumerate(kinds):
            points = [(error["layer"], error["sqnr_db"]) for error in errors if error["kind"] == kind]
            axis.plot(*zip(*points, strict=True), marker=_MARKERS[index % len(_MARKERS)], color=series(index),
                      markersize=6, linewidth=1.2, markeredgewidth=0, label=kind)  # fmt: skip
        numbers = [error["layer"] for error in errors]
        axis.set_xlim(min(numbers) - 0.5, max(numbers) + 0.5)
        axis.margins(y=0.12)
        axis.xaxis.set_major_locator(_locator(width // 45, integer=True))
        axis.yaxis.set_major_locator(_locator(6))
        axis.grid(axis="y")
        axis.set_xlabel("layer")
        axis.set_ylabel("SQNR, dB")
        drawing.legend(loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=columns, handlelength=1.4, fontsize=12,
                       columnspacing=1.4, borderaxespad=0)  # fmt: skip
        worst = min(errors, key=lambda error: error["sqnr_db"])
        label = f"SQNR per layer; the lowest is {worst['sqnr_db']:.1f} dB, {worst['kind']} of layer {worst['layer']}"
        return inline(drawing, name=name, label=label, css_class="plot")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _locator(most: int, *, integer: bool = False) -> object:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(max(1, most), integer=integer)
