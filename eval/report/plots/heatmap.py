"""The error of every quantized module: layers along one side, modules along the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.report.plots.axes import LETTER, whole_ticks
from eval.report.svg import HEATS, colour, figure, heat, inline

BIT_DB = 6.02
"""Signal to noise of one bit, 20 log10(2) dB: the least range that the colours span, so that mere noise stays pale."""

Cells = Mapping[tuple[int, str], float]


def span(cells: Cells) -> tuple[float, float]:
    """The SQNR in dB of the most and of the least conspicuous colour."""
    high = max(cells.values())
    return min(min(cells.values()), high - BIT_DB), high


def heatmap(cells: Cells, kinds: Sequence[str], *, width: int, name: str) -> str:
    """SQNR in dB by (layer, kind): the lower, the more conspicuous.

    Layers run to the right where there is room for them, and downwards on a narrow screen.
    """
    layers = list(range(min(layer for layer, _ in cells), max(layer for layer, _ in cells) + 1))
    upright = width < 500
    names = max(len(kind) for kind in kinds) * LETTER * 12 + 12
    if upright:
        row, left, right, top, bottom = max(5, min(15, 620 // len(layers))), 40, 4, 8 + round(names), 6
        height = top + row * len(layers) + bottom
    else:
        row, left, right, top, bottom = 24, round(names), 4, 4, 40
        height = top + row * len(kinds) + bottom
    from matplotlib.patches import Rectangle

    low, high = span(cells)
    with figure(width, height) as (drawing, axis):
        # Few layers or kinds make cells of a sensible size, not a wall.
        along = len(kinds) if upright else len(layers)
        used = min(width - left - right, along * (46 if upright else 40))
        seam = min(1.0, 0.12 * (row if upright else used / len(layers)))
        drawing.subplots_adjust(left=left / width, right=(left + used) / width, top=1 - top / height,
                                bottom=bottom / height)  # fmt: skip
        for (layer, kind), value in cells.items():
            at = (layer - layers[0], kinds.index(kind))
            fill = heat((high - value) / (high - low))
            axis.add_patch(Rectangle(at[::-1] if upright else at, 1, 1, facecolor=fill, edgecolor=colour("paper"),
                                     linewidth=seam))  # fmt: skip
        across, down = (len(kinds), len(layers)) if upright else (len(layers), len(kinds))
        axis.set_xlim(0, across)
        axis.set_ylim(down, 0)
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.tick_params(length=0, pad=5)
        ticks = whole_ticks(layers, row * len(layers) // 26 if upright else used // 34)
        middle = [index + 0.5 for index in range(len(kinds))]
        if upright:
            axis.xaxis.tick_top()
            axis.set_xticks(middle, kinds, rotation=90)
            axis.set_yticks([tick - layers[0] + 0.5 for tick in ticks], ticks)
        else:
            axis.set_yticks(middle, kinds)
            axis.set_xticks([tick - layers[0] + 0.5 for tick in ticks], ticks)
            axis.set_xlabel("layer")
        (layer, kind), worst = min(cells.items(), key=lambda item: item[1])
        label = f"SQNR by layer and module; the lowest is {worst:.1f} dB, {kind} of layer {layer}"
        return inline(drawing, name=name, label=label, css_class="plot")


def scale(cells: Cells) -> list[tuple[str, int]]:
    """The legend: a value in dB and a step of the colour scale, from the least to the most conspicuous."""
    low, high = span(cells)
    return [(f"{high - (high - low) * step / (HEATS - 1):.1f}", step) for step in range(HEATS)]
