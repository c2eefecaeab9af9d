"""The series of a soak as small multiples, each from zero."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.bench.soak import Round


def draw(series: Sequence[Round], path: Path) -> None:
    """Write an SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "soak"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    panels = (
        ("memory of the fleet that stays, MB", [one.rss / 1e6 for one in series]),
        ("its descriptors", [one.descriptors for one in series]),
        ("store after gc, MB", [one.store / 1e6 for one in series]),
        ("files in it", [one.files for one in series]),
        ("temporary files", [one.temporary for one in series]),
        ("processes and held locks left", [one.processes + one.locks for one in series]),
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 4.5), sharex=True, layout="constrained")
    for axis, (title, values) in zip(axes.flat, panels, strict=True):
        axis.plot(range(1, len(series) + 1), values, linewidth=1, color="#1f6f8b")
        axis.set_title(title, fontsize=9)
        axis.set_ylim(0, max(1, *values) * 1.15)
        axis.tick_params(labelsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("round", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
