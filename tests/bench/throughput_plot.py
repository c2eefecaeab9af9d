"""The benchmark as a picture: the ratio of output tokens/s against the requests in flight, with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = ("#0b7a75", "#c8553d", "#6a5acd", "#9aa0a6")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write a PNG or an SVG, by the file's ending; faint dots are launches over the median of the other side."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "quantmint"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    drawing, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    cells = list(dict.fromkeys(cell["cell"] for result in found["cases"].values() for cell in result["cells"]))
    for number, (case, result) in enumerate(found["cases"].items()):
        colour = _COLOURS[number % len(_COLOURS)]
        shift = 0.14 * (number - (len(found["cases"]) - 1) / 2)
        for cell in result["cells"]:
            x = cells.index(cell["cell"]) + shift
            axis.plot([x, x], [cell["ratio_low"], cell["ratio_high"]], color=colour, linewidth=2)
            dots = [value / cell["baseline"] for value in cell["values_candidate"]]
            axis.plot([x + 0.04] * len(dots), dots, "o", color=colour, alpha=0.35, markersize=4)
            label = case if cell is result["cells"][0] else None
            axis.plot([x], [cell["ratio"]], "D", color=colour, markersize=7, label=label)
            axis.annotate(f"{cell['ratio']:.2f}", (x, cell["ratio"]), (-9, 0), textcoords="offset points", ha="right",
                          va="center", fontsize=9)  # fmt: skip
    axis.axhline(1, color="#222222", linewidth=1)
    axis.axhline(found["promise"], color="#222222", linewidth=1, linestyle=":")
    axis.set_xticks(range(len(cells)), cells)
    axis.set_xlim(-0.5, len(cells) - 0.5)
    axis.set_ylabel("output tokens/s, candidate / bf16")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    machine = found["machine"]
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    axis.set_title(f"{found['shape']}, {where}, vLLM {found['vllm']}", loc="left", fontsize=10, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(drawing)
