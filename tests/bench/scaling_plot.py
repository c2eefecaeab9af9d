"""Scaling as a picture: measured on this machine, and modelled for more nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MEASURED, _MODELLED = "#0b7a75", "#c8553d"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG or an SVG, by the file's ending; what is modelled has open marks and broken lines."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "quantmint"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    drawing, (here, more) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    runs = result["runs"]
    here.barh(range(len(runs)), [run["quantize"] for run in runs.values()], height=0.6, color=_MEASURED)
    for place, run in enumerate(runs.values()):
        here.annotate(f" {run['quantize']:.1f} s", (run["quantize"], place), va="center", fontsize=9)
    here.set_yticks(range(len(runs)), list(runs), fontsize=9)
    here.invert_yaxis()
    here.set_xlim(0, 1.2 * max(run["quantize"] for run in runs.values()))
    here.set_xlabel("seconds, quantizing", fontsize=9)
    machine = result["machine"]
    beside = ", others at work" if result["disturbed"] else ""
    title = f"measured: {machine['cores']} cores of one machine{beside}"
    here.set_title(title, loc="left", fontsize=10, fontweight="bold")
    models: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["modelled"]["rows"]:
        models.setdefault(row["model"], []).append(row)
    for (name, rows), mark in zip(models.items(), "os^", strict=False):
        nodes = [row["nodes"] for row in rows]
        options = {"color": _MODELLED, "marker": mark, "markerfacecolor": "white", "linewidth": 1.2}
        more.plot(
            nodes, [row["quantize_speedup"] for row in rows], linestyle="--", label=f"quantize, {name}", **options
        )
        if all(row["calibrate_speedup"] for row in rows):
            speedups = [row["calibrate_speedup"] for row in rows]
            more.plot(nodes, speedups, linestyle=":", label=f"calibrate, {name}", **{**options, "color": "#6a5acd"})
    more.plot(nodes, nodes, color="#9aa0a6", linewidth=0.8, label="one for one")
    more.set_xticks(nodes)
    more.set_xlabel("nodes", fontsize=9)
    more.set_ylabel("times one node", fontsize=9)
    more.set_title("modelled from measured parts", loc="left", fontsize=10, fontweight="bold")
    more.legend(fontsize=7, frameon=False)
    for axis in (here, more):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(drawing)
