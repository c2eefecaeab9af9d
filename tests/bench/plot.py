"""The benchmark as a picture: seconds of every contender, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.contenders import CASES
from tests.bench.figures import measured

_COLOURS = {"cp": "#9aa0a6", "quantmint": "#0b7a75", "llm-compressor": "#c8553d", "quark": "#6a5acd"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG or an SVG, by the file's ending; bars end where all is written, thin lines where all is durable."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "quantmint"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    cases = result["cases"]
    heights = [sum(map(measured, rows.values())) for rows in cases.values()]
    drawing, axes = pyplot.subplots(
        len(cases), 1, figsize=(9, 0.75 * len(cases) + 0.38 * sum(heights) + 0.5), squeeze=False,
        height_ratios=[max(height, 1) for height in heights], layout="constrained",
    )  # fmt: skip
    for axis, (case, rows) in zip(axes[:, 0], cases.items(), strict=True):
        shown = {contender: row for contender, row in rows.items() if measured(row)}
        longest = max((row["durable"]["median"] for row in shown.values()), default=1.0)
        ours = shown.get("quantmint")
        for place, (contender, row) in enumerate(shown.items()):
            written, durable = row["written"], row["durable"]["median"]
            axis.barh(place, written["median"], height=0.62, color=_COLOURS[contender])
            axis.plot([written["median"], durable], [place, place], color=_COLOURS[contender], linewidth=2)
            axis.plot([written["min"], written["max"]], [place + 0.38] * 2, color="#444444", linewidth=0.8)
            words = f"{written['median']:.1f} s"
            if ours is not None and contender != "quantmint":
                words += f", {written['median'] / ours['written']['median']:.1f} x ours"
            if row["peak_rss"]:
                words += f", {row['peak_rss'] / 1e9:.1f} GB resident"
            axis.annotate(words, (durable + 0.012 * longest, place), va="center", fontsize=9, color="#222222")
        axis.set_yticks(range(len(shown)), [row["name"] for row in shown.values()], fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.38 * longest)
        axis.set_title(f"{case}: {CASES[case]}", loc="left", fontsize=10, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    axes[-1, 0].set_xlabel("seconds after warm-up: bars until written, lines until durable; medians", fontsize=9)
    machine = result["machine"]
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    drawing.suptitle(f"{result['model_gb']:.1f} GB of bf16 on {where}", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(drawing)
