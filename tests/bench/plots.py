"""The benchmarks as pictures: an SVG or a PNG by the file's ending, the same for the same figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.contenders import CASES
from tests.bench.figures import PARTS, measured, rows

_COLOURS = {"quantmint": "#0b7a75", "llm-compressor": "#c8553d", "quark": "#6a5acd", "cp": "#9aa0a6"}
_OURS, _OTHER, _THIRD, _GREY = _COLOURS.values()


@contextmanager
def _drawing(path: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure with its axes (options are those of `pyplot.subplots`), written in the end."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "quantmint"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(layout="constrained", squeeze=False, **options)
    yield drawing, axes.flat
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(drawing)


def _title(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10, fontweight="bold")


def _where(machine: Mapping[str, Any]) -> str:
    return machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"


_PARTS = dict(zip((*PARTS, "end"), ("#9aa0a6", "#6a5acd", "#0b7a75", "#e0a030", "#4f9fd9", "#d5d8db"), strict=True))
_PLAIN = {"cp": "work"}  # the other baselines are imports


def quantizing(result: Mapping[str, Any], path: Path) -> None:
    """Seconds of every command by its parts, case by case; thin lines until all is on the disk."""
    found = rows(result)
    baselines = {name: row for name, row in found.pop("", {}).items() if measured(row)}
    shown = [{name: row for name, row in those.items() if measured(row)} | baselines for those in found.values()]
    heights = [max(len(those), 1) for those in shown]
    size = (9, 0.75 * len(shown) + 0.36 * sum(heights) + 0.8)
    with _drawing(path, nrows=len(shown), figsize=size, height_ratios=heights) as (drawing, axes):
        for axis, case, those in zip(axes, found, shown, strict=True):
            longest = max((row["wall"] + (row["later"] or 0.0) for row in those.values()), default=1.0)
            for place, (name, row) in enumerate(those.items()):
                begin, wall = 0.0, row["wall"]
                for part, seconds in (row["parts"] or {_PLAIN.get(name, "start"): wall}).items():
                    axis.barh(place, seconds, left=begin, height=0.62, color=_PARTS[part])
                    begin += seconds
                end = wall + (row["later"] or 0.0)
                axis.plot([wall, end], [place, place], color=_PARTS["flush"], linewidth=2)
                axis.plot([row["wall_min"], row["wall_max"]], [place + 0.38] * 2, color="#444444", linewidth=0.8)
                words = f"{wall:.1f} s, {row['rss'] / 1e9:.1f} GB"
                axis.annotate(words, (end + 0.012 * longest, place), va="center", fontsize=9, color="#222222")
            axis.set_yticks(range(len(those)), [row["title"] for row in those.values()], fontsize=9)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.25 * longest)
            _title(axis, f"{case}: {CASES[case]}")
            axis.tick_params(axis="x", labelsize=8)
        axis.set_xlabel("seconds from start to exit, medians; thin lines until all is on the disk", fontsize=9)
        title = f"{result['model_gb']:.1f} GB of bf16 on {_where(result['machine'])}"
        drawing.suptitle(title, fontsize=11, x=0.01, ha="left")
        bars = [drawing.axes[0].barh(0, 0, color=colour) for colour in _PARTS.values()]
        drawing.legend(bars, list(_PARTS), loc="outside lower center", ncols=len(_PARTS), fontsize=8, frameon=False)


def scaling(result: Mapping[str, Any], path: Path) -> None:
    """Measured here, and modelled for more nodes: what is modelled has open marks and broken lines."""
    with _drawing(path, ncols=2, figsize=(10, 3.6)) as (_, (here, more)):
        seconds = {name: run["quantize"] for name, run in result["runs"].items()}
        here.barh(range(len(seconds)), seconds.values(), height=0.6, color=_OURS)
        for place, value in enumerate(seconds.values()):
            here.annotate(f" {value:.1f} s", (value, place), va="center", fontsize=9)
        here.set_yticks(range(len(seconds)), list(seconds), fontsize=9)
        here.invert_yaxis()
        here.set_xlim(0, 1.2 * max(seconds.values()))
        here.set_xlabel("seconds, quantizing", fontsize=9)
        beside = ", others at work" if result["disturbed"] else ""
        _title(here, f"measured: {result['machine']['cores']} cores of one machine{beside}")
        models: dict[str, list[Mapping[str, Any]]] = {}
        for row in result["modelled"]["rows"]:
            models.setdefault(row["model"], []).append(row)
        for (name, rows), mark in zip(models.items(), "os^", strict=False):
            nodes = [row["nodes"] for row in rows]
            for what, style, colour in (("quantize", "--", _OTHER), ("calibrate", ":", _THIRD)):
                speedups = [row[f"{what}_speedup"] for row in rows]
                if all(speedups):
                    more.plot(nodes, speedups, linestyle=style, label=f"{what}, {name}", color=colour, marker=mark,
                              markerfacecolor="white", linewidth=1.2)  # fmt: skip
        more.plot(nodes, nodes, color=_GREY, linewidth=0.8, label="one for one")
        more.set_xticks(nodes)
        more.set_xlabel("nodes", fontsize=9)
        more.set_ylabel("times one node", fontsize=9)
        _title(more, "modelled from measured parts")
        more.legend(fontsize=7, frameon=False)
        for axis in (here, more):
            axis.tick_params(labelsize=8)


def serving(found: Mapping[str, Any], path: Path) -> None:
    """The ratio of output tokens/s with its interval, cell by cell; faint dots are launches over the other's median."""
    with _drawing(path, figsize=(8, 4.2)) as (_, (axis,)):
        cells = list(dict.fromkeys(cell["cell"] for result in found["cases"].values() for cell in result["cells"]))
        for number, (case, result) in enumerate(found["cases"].items()):
            colour = (_OURS, _OTHER, _THIRD, _GREY)[number % 4]
            shift = 0.14 * (number - (len(found["cases"]) - 1) / 2)
            for cell in result["cells"]:
                x = cells.index(cell["cell"]) + shift
                axis.plot([x, x], [cell["ratio_low"], cell["ratio_high"]], color=colour, linewidth=2)
                dots = [value / cell["baseline"] for value in cell["values_candidate"]]
                axis.plot([x + 0.04] * len(dots), dots, "o", color=colour, alpha=0.35, markersize=4)
                label = case if cell is result["cells"][0] else None
                axis.plot([x], [cell["ratio"]], "D", color=colour, markersize=7, label=label)
                axis.annotate(f"{cell['ratio']:.2f}", (x, cell["ratio"]), (-9, 0), textcoords="offset points",
                              ha="right", va="center", fontsize=9)  # fmt: skip
        axis.axhline(1, color="#222222", linewidth=1)
        axis.axhline(found["promise"], color="#222222", linewidth=1, linestyle=":")
        axis.set_xticks(range(len(cells)), cells)
        axis.set_xlim(-0.5, len(cells) - 0.5)
        axis.set_ylabel("output tokens/s, candidate / bf16")
        axis.legend(frameon=False)
        _title(axis, f"{found['shape']}, {_where(found['machine'])}, vLLM {found['vllm']}")


def quality(result: Mapping[str, Any], path: Path) -> None:
    """Bits of a weight against KL to the 16-bit model, a mark for each checkpoint; lines are two standard errors."""
    with _drawing(path, figsize=(9, 5)) as (_, (axis,)):
        known: set[str] = set()
        names: dict[float, float] = {}  # the height of the last one by bits: each stands above the one before
        for row in sorted((row for row in result["rows"] if "kl" in row), key=lambda row: row["kl"]):
            colour, kl, error = _COLOURS.get(row["by"], _GREY), row["kl"], 2 * row["kl_error"]
            axis.plot([row["bits"]] * 2, [max(kl - error, kl / 2), kl + error], color=colour, linewidth=1)
            label = row["by"] if row["by"] not in known else None
            axis.plot([row["bits"]], [kl], "o", color=colour, label=label)
            column = round(row["bits"], 1)
            names[column] = max(kl, 1.12 * names.get(column, 0))
            axis.annotate(row["name"], (row["bits"], kl), (row["bits"] + 0.05, names[column]), va="center", fontsize=8)
            known.add(row["by"])
        axis.set_yscale("log")
        axis.margins(x=0.15)
        axis.set_xlabel("bits stored for a weight", fontsize=9)
        axis.set_ylabel("KL to the 16-bit model, nats", fontsize=9)
        axis.legend(frameon=False, fontsize=8)
        _title(axis, f"{result['model']}, {result['windows']} x 512 tokens that no calibration saw")
