"""Draw what quantization did to each layer: error by module, scales of the KV cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quantmint.eval.report.model import Report, ShownLayerError
from quantmint.eval.report.plots import (
    HEATS,
    LETTER,
    both_widths,
    colour,
    figure,
    heat,
    inline,
    plain_values,
    series,
    whole_ticks,
)  # fmt: skip


def errors(report: Report) -> dict[str, Any] | None:
    """Return the values of the template's section on weight errors, SQNR by layer and module.

    None if no weight was compared with its source.
    """
    inside = [error for error in report["layers"] if error["layer"] is not None]
    outside = [error for error in report["layers"] if error["layer"] is None]
    if not report["layers"]:
        return None
    kinds = list(dict.fromkeys(error["kind"] for error in inside))
    cells: dict[tuple[int, str], float] = {}
    for error in inside:
        place = (error["layer"] or 0, error["kind"])
        cells[place] = min(error["sqnr_db"], cells.get(place, error["sqnr_db"]))
    worst = sorted(report["layers"], key=lambda error: error["sqnr_db"])[:3]
    return {
        "plot": both_widths(partial(heatmap, cells, kinds), "layers") if cells else None,
        "scale": scale(cells) if cells else [],
        "kinds": kinds,
        "rows": [
            (layer, [cells.get((layer, kind)) for kind in kinds]) for layer in sorted({layer for layer, _ in cells})
        ],
        "outside": outside,
        "worst": [f"{error['sqnr_db']:.1f} dB {_where(error)}" for error in worst],
        "experts": sum(error["modules"] for error in report["layers"]) > len(report["layers"]),
    }


def cache(report: Report) -> dict[str, Any] | None:
    """Return the values of the template's section on scales of the KV cache; None if the cache has no scales."""
    if not report["kv_scales"]:
        return None
    profiles: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for entry in report["kv_scales"]:
        profiles[entry["which"]][entry["layer"]] = (entry["low"], entry["high"])
    layers = sorted({layer for profile in profiles.values() for layer in profile})
    heads = any(low != high for profile in profiles.values() for low, high in profile.values())
    return {
        "plot": both_widths(partial(kv_scales, profiles), "kv-scales"),
        "names": list(profiles),
        "rows": [(layer, [profiles[which].get(layer) for which in profiles]) for layer in layers],
        "heads": heads,
    }


def _where(error: ShownLayerError) -> str:
    return error["kind"] if error["layer"] is None else f"{error['kind']} of layer {error['layer']}"


BIT_DB = 6.02
"""Signal to noise of one bit, 20 log10(2) dB: the least range that the colours span, so that mere noise stays pale."""

Cells = Mapping[tuple[int, str], float]


def span(cells: Cells) -> tuple[float, float]:
    """Return the SQNR in dB at the two ends of the colour scale: of the strongest colour, then of the palest."""
    high = max(cells.values())
    return min(min(cells.values()), high - BIT_DB), high


def heatmap(cells: Cells, kinds: Sequence[str], *, width: int, name: str) -> str:
    """Draw the SQNR in dB by (layer, kind), as an inline SVG: the lower, the more conspicuous.

    `kinds` are the roles of modules in the order to show them. Layers run to the right if there is room for them, and
    downwards on a narrow screen.
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
    # Few layers or kinds make cells of a sensible size, not a wall.
    used = min(width - left - right, len(kinds) * 46 if upright else len(layers) * 40)
    seam = min(1.0, 0.12 * (row if upright else used / len(layers)))
    with figure(width, height, (left, width - left - used, top, bottom)) as (drawing, axis):
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
        return inline(drawing, name=name, label=label)


def scale(cells: Cells) -> list[tuple[str, int]]:
    """Return the legend: (value in dB, step of the colour scale) from the least to the most conspicuous."""
    low, high = span(cells)
    return [(f"{high - (high - low) * step / (HEATS - 1):.1f}", step) for step in range(HEATS)]


def kv_scales(profiles: Mapping[str, Mapping[int, tuple[float, float]]], *, width: int, name: str) -> str:
    """Draw the scales of the KV cache by layer, as an inline SVG: a line for K and one for V.

    ``profiles[which][layer]`` is the least and the greatest scale of a layer; with a scale per head the band spans
    them.
    """
    with figure(width, 230, (56, 14, 12, 42)) as (drawing, axis):
        for index, (which, layers) in enumerate(profiles.items()):
            numbers = sorted(layers)
            lows, highs = ([layers[layer][end] for layer in numbers] for end in (0, 1))
            axis.fill_between(numbers, lows, highs, color=series(index), alpha=0.25, linewidth=0)
            dot = "os^D"[index % 4] if len(numbers) <= 64 else None
            axis.plot(numbers, highs, color=series(index), linewidth=1.8, marker=dot, markersize=5, label=which,
                      markeredgecolor=colour("paper"), markeredgewidth=0.6)  # fmt: skip
        plain_values(axis, [end for layers in profiles.values() for pair in layers.values() for end in pair], 5)
        layers_shown = [layer for layers in profiles.values() for layer in layers]
        axis.set_xlim(min(layers_shown) - 0.5, max(layers_shown) + 0.5)
        ticks = whole_ticks(range(min(layers_shown), max(layers_shown) + 1), width // 45)
        axis.set_xticks(ticks, ticks)
        axis.tick_params(length=0)
        axis.grid(axis="y")
        axis.set_xlabel("layer")
        axis.set_ylabel("scale")
        label = "; ".join(
            f"{which}: {min(low for low, _ in layers.values()):.3g} to {max(high for _, high in layers.values()):.3g}"
            for which, layers in profiles.items()
        )
        return inline(drawing, name=name, label=f"KV cache scales by layer. {label}")
