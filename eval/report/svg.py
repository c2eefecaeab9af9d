"""Matplotlib figures as inline SVG that takes its colours and font from the page's style sheet.

A figure is drawn with stand-in colours, which become CSS variables afterwards: one picture then serves the light and
the dark theme. Text stays text, so that it can be searched, copied and read aloud.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SERIES = 8
_NAMES = ("ink", "muted", "rule", "baseline", "candidate", "pass", "inconclusive", "fail", "invalid", "paper")
# Stand-ins differ in the last digits only, and no plot uses colours near them.
_STAND_INS = {name: f"#0a0b{index:02x}" for index, name in enumerate(_NAMES)}
_STAND_INS |= {f"series-{index}": f"#0a0c{index:02x}" for index in range(_SERIES)}
HEATS = 9
"""Steps of the colour scale of a heat map; step 0 is the least conspicuous."""
_STAND_INS |= {f"heat-{index}": f"#0a0d{index:02x}" for index in range(HEATS)}

PIXELS_PER_INCH = 72.0


def colour(name: str) -> str:
    """The stand-in for the CSS variable `--name`."""
    return _STAND_INS[name]


def series(index: int) -> str:
    """The stand-in for the colour of the index-th series; colours repeat after eight."""
    return _STAND_INS[f"series-{index % _SERIES}"]


def heat(share: float) -> str:
    """The stand-in for a place between 0 (least conspicuous) and 1 on the colour scale of a heat map."""
    return _STAND_INS[f"heat-{min(HEATS - 1, max(0, int(share * HEATS)))}"]


@contextmanager
def figure(width: int, height: int) -> Iterator[tuple[Any, Any]]:
    """A figure with one plain axis, sized in CSS pixels; it is closed afterwards."""
    with panels(width, height, 1, 1) as (drawing, axes):
        yield drawing, axes[0]


@contextmanager
def panels(width: int, height: int, rows: int, columns: int) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with a grid of plain axes, in the order of reading, sized in CSS pixels; it is closed afterwards."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "quantmint",
        "text.parse_math": False,  # a task may be named with dollar signs
        "font.size": 12,
        "text.color": colour("ink"),
        "axes.labelcolor": colour("muted"),
        "axes.edgecolor": colour("rule"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": colour("rule"),
        "grid.linewidth": 0.8,
        "xtick.color": colour("rule"),
        "ytick.color": colour("rule"),
        "xtick.labelcolor": colour("muted"),
        "ytick.labelcolor": colour("muted"),
        "legend.frameon": False,
    }
    with mpl.rc_context(settings):
        drawing = Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH)
        FigureCanvasSVG(drawing)
        drawing.patch.set_visible(False)
        axes = [drawing.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
        for axis in axes:
            axis.patch.set_visible(False)
        yield drawing, axes


def inline(drawing: Any, *, name: str, label: str, css_class: str) -> str:
    """The figure as an `<svg>` element with ids that start with `name` and `label` as its accessible name."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    for variable, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{variable})")
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", text)
    text = text.replace(
        "font: 700 ", "font: 600 "
    )  # the page's bold; matplotlib knows only the weights it has files of
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None  # noqa: S101 - matplotlib always writes it
    opening = (
        f'<svg class="{css_class}" role="img" aria-label="{html.escape(label)}" viewBox="{size[0][9:-1]}" '
        f'style="max-width:{float(size[1]):.0f}px" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return re.sub(r"^<svg[^>]*>", lambda _: opening, text)
