"""The static scales of the KV cache, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

from eval.report.plots.axes import number, plain_ticks, whole_ticks
from eval.report.svg import colour, figure, inline, series


def kv_scales(profiles: Mapping[str, Mapping[int, tuple[float, float]]], *, width: int, name: str) -> str:
    """One line for each of K and V; with a scale a head the band spans the heads. ``profiles[which][layer]`` is the
    least and the greatest scale of a layer."""
    left, right, top, bottom, height = 56, 14, 12, 42, 230
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=left / width, right=1 - right / width, top=1 - top / height,
                                bottom=bottom / height)  # fmt: skip
        for index, (which, layers) in enumerate(profiles.items()):
            numbers = sorted(layers)
            lows, highs = ([layers[layer][end] for layer in numbers] for end in (0, 1))
            axis.fill_between(numbers, lows, highs, color=series(index), alpha=0.25, linewidth=0)
            dot = "os^D"[index % 4] if len(numbers) <= 64 else None
            axis.plot(numbers, highs, color=series(index), linewidth=1.8, marker=dot, markersize=5, label=which,
                      markeredgecolor=colour("paper"), markeredgewidth=0.6)  # fmt: skip
        ends = [end for layers in profiles.values() for pair in layers.values() for end in pair]
        if max(ends) > 25 * min(ends) > 0:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda value, _: number(value))
            axis.minorticks_off()
        else:
            axis.set_ylim(0, 1.12 * max(*ends, 1e-12))
            plain_ticks(axis, y=5)
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
        return inline(drawing, name=name, label=f"KV cache scales by layer. {label}", css_class="plot")
