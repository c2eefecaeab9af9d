"""Draw the plots of every page: matplotlib's figures as inline SVG, panels and ticks, intervals, points in a plane.

A figure is drawn with stand-in colours, which become variables of the page's style sheet afterwards: one picture then
serves the light and the dark theme. Text stays text, so that it can be searched, copied and read aloud. Each plot is
drawn twice, for wide and for narrow screens, so that text keeps its size on a phone.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup


WIDE, NARROW = 760, 340
"""Widths in CSS pixels that plots are drawn for; the style sheet shows the one that fits."""

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
    """Return the stand-in colour for the CSS variable `--name`; `inline` replaces it."""
    return _STAND_INS[name]


def series(index: int) -> str:
    """Return the stand-in colour of the series with this index; colours repeat after eight."""
    return _STAND_INS[f"series-{index % _SERIES}"]


def heat(share: float) -> str:
    """Return the stand-in colour for a place on a heat map's colour scale, from 0 (least conspicuous) to 1."""
    return _STAND_INS[f"heat-{min(HEATS - 1, max(0, int(share * HEATS)))}"]


@contextmanager
def figure(width: int, height: int, margins: tuple[float, ...] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield a matplotlib figure and its only axis.

    Sizes are in CSS pixels; `margins` are left, right, top and bottom.
    """
    with panels(width, height, 1, 1) as (drawing, axes):
        if margins is not None:
            left, right, top, bottom = margins
            drawing.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        yield drawing, axes[0]


@contextmanager
def panels(width: int, height: int, rows: int, columns: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a matplotlib figure and the axes of a grid, row by row; sizes are in CSS pixels.

    Within the block matplotlib's settings are those of the pages.
    """
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


def inline(drawing: Any, *, name: str, label: str) -> str:
    """Return the figure as an `<svg>` element whose ids start with `name`, with `label` as its accessible name."""
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
    text = text.replace("font: 700 ", "font: 600 ")  # the page's bold, of which matplotlib has no file
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None  # noqa: S101 - matplotlib always writes it
    opening = (
        f'<svg class="plot" role="img" aria-label="{html.escape(label)}" viewBox="{size[0][9:-1]}" '
        f'style="max-width:{float(size[1]):.0f}px" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return re.sub(r"^<svg[^>]*>", lambda _: opening, text)


def both_widths(draw: Callable[..., str], name: str, *, wide: int = WIDE) -> Markup:
    """Return HTML with a figure in two widths, of which the style sheet shows the one that fits the screen.

    ``draw`` is called with `width` in CSS pixels and with the prefix `name` of the ids.
    """
    from markupsafe import Markup

    figures = (
        f'<div class="wide">{draw(width=wide, name=f"{name}-w")}</div>'
        f'<div class="narrow">{draw(width=NARROW, name=f"{name}-n")}</div>'
    )
    return Markup(figures)  # noqa: S704 - our own SVG, whose text matplotlib escapes


LETTER = 0.6
"""Mean width of a letter, in units of the font size."""


@dataclass(frozen=True, slots=True)
class PanelGrid:
    """A grid of panels of equal size; lengths are in CSS pixels.

    `left`, `right`, `top` and `bottom` are the margins of each panel, for ticks and for a title above.
    """

    width: int
    columns: int
    panels: int
    panel_height: int
    left: int = 48
    right: int = 12
    top: int = 30
    bottom: int = 42

    @property
    def rows(self) -> int:
        """Return the number of rows of panels."""
        return -(-self.panels // self.columns)

    @property
    def height(self) -> int:
        """Return the height of the whole figure in CSS pixels."""
        return self.rows * (self.top + self.panel_height + self.bottom)

    def place(self, axes: Sequence[Any]) -> list[Any]:
        """Move the axes to the panels' places and hide those beyond the last panel; return the others."""
        cell = self.width / self.columns
        for number, axis in enumerate(axes):
            row, column = divmod(number, self.columns)
            low = self.height - row * (self.top + self.panel_height + self.bottom)
            low -= self.top + self.panel_height
            box = (column * cell + self.left, low, cell - self.left - self.right, self.panel_height)
            sides = (self.width, self.height) * 2
            axis.set_position([side / whole for side, whole in zip(box, sides, strict=True)])
            axis.set_visible(number < self.panels)
        return list(axes[: self.panels])


def title(axis: Any, text: str, *, size: float = 13, left: int = 0) -> None:
    """Write a bold title above an axis, beginning ``left`` pixels before its left edge."""
    axis.annotate(text, (0, 1), (-left, 12), xycoords="axes fraction", textcoords="offset points", fontsize=size,
                  fontweight="bold", color=colour("ink"), va="center")  # fmt: skip


def row_title(axis: Any, y: float, text: str, tail: str, width: int, *, above: int = 0) -> None:
    """Write a row's name, shortened to fit, at the left and ``tail`` at the right.

    Both stand ``above`` points over the height ``y`` of a figure that is ``width`` pixels wide.
    """
    room = width - LETTER * 12 * (len(tail) + 2)
    for words, x, ha, weight, size, tint in (
        (shorten(text, room, 14), 0, "left", "bold", 13, "ink"),
        (tail, 1, "right", "normal", 12, "muted"),
    ):
        axis.annotate(words, (x, y), (0, above), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=size, fontweight=weight, ha=ha, va="center", color=colour(tint),
                      bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 1})  # fmt: skip


def number(value: float) -> str:
    """Return a tick's value as text: three digits, thousands with commas."""
    if value == 0:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def locator(most: int, *, integer: bool = False) -> Any:
    """Return a matplotlib locator of ticks at round numbers, with at most ``most`` intervals."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(max(1, most), integer=integer, steps=[1, 2, 2.5, 5, 10])


def plain_values(axis: Any, values: Sequence[float], ticks: int) -> None:
    """Set up a y axis for these values, from 0 on; logarithmic if the greatest is more than 25 times the least."""
    if not max(values) > 25 * min(values) > 0:
        axis.set_ylim(0, 1.12 * max(*values, 1e-12))
        plain_ticks(axis, y=ticks)
        return
    from matplotlib.ticker import LogLocator

    axis.set_yscale("log")
    axis.set_ylim(min(values) / 1.6, max(values) * 1.6)
    # Every power of ten, and what lies between where they are few: a single tick is no scale.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 1e3 * min(values) else (1,), numticks=9))
    axis.yaxis.set_major_formatter(lambda value, _: number(value))
    axis.minorticks_off()
    axis.tick_params(length=0)


def whole_ticks(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most about ``most`` round numbers among consecutive ones; all of them if they are no more than that."""
    if len(numbers) <= most:
        return list(numbers)
    ticks = locator(most, integer=True).tick_values(numbers[0], numbers[-1])
    return [round(tick) for tick in ticks if numbers[0] <= tick <= numbers[-1]]


def plain_ticks(axis: Any, *, x: int | None = None, y: int | None = None) -> None:
    """Put plain numbers without marks on the axes, at most ``x`` and ``y`` intervals; None leaves an axis alone."""
    if x is not None:
        axis.xaxis.set_major_locator(locator(x))
        axis.xaxis.set_major_formatter(lambda value, _: number(value))
    if y is not None:
        axis.yaxis.set_major_locator(locator(y))
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
    axis.tick_params(length=0)


def at_values(axis: Any, values: Sequence[float], room: float) -> None:
    """Put ticks at these values of a logarithmic x axis ``room`` pixels wide, except those that would collide."""
    low, high = axis.get_xlim()
    scale = room / math.log(high / low)
    ticks: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not ticks or math.log(ticks[-1] / value) * scale >= 12 * LETTER * (len(number(value)) + 1.5):
            ticks.append(value)
    axis.set_xticks(ticks[::-1], [number(value) for value in ticks[::-1]])
    axis.minorticks_off()


def shorten(text: str, pixels: float, size: float) -> str:
    """Return the text, its middle replaced by an ellipsis if it is wider than ``pixels`` at the font ``size``."""
    letters = max(4, int(pixels / (LETTER * size)))
    if len(text) <= letters:
        return text
    tail = letters // 3
    return f"{text[: letters - tail - 1]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"


Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One estimate in a forest plot, in the unit of its axis.

    ``bounds`` are the two one-sided bounds that decide (None: none are computed), ``interval`` the two-sided interval.
    The worse side of ``limit`` is shaded (None: nothing decides). ``label`` and ``tail`` stand at the left and the
    right, ``tone`` is the name of a colour of the page.
    """

    label: str
    tail: str
    value: float
    interval: Span
    limit: float | None
    tone: str
    bounds: Span | None = None


def forest(
    rows: Sequence[Row],
    *,
    axis_label: str,
    label: str,
    width: int,
    name: str,
    more_is_worse: bool = False,
    least_span: float = 0.4,
) -> str:
    """Draw estimates one below the other, as an inline SVG.

    A thick bar spans the bounds, a thin line the interval. The shaded side beyond a limit is the left one, or with
    ``more_is_worse``, as for a perplexity, the right one. ``label`` is the accessible name, ``name`` the prefix of the
    ids; the axis spans at least ``least_span``.
    """
    row, top, bottom = 58, 6, 44
    height = top + bottom + row * len(rows)
    with figure(width, height, (0, 0, top, bottom)) as (drawing, axis):
        low, high = _limits(rows, least_span)
        axis.set_xlim(low, high)
        axis.set_ylim(len(rows), 0)
        edge = high if more_is_worse else low
        for index, item in enumerate(rows):
            y, band = index + 0.66, [index + 0.42, index + 0.94]
            ink = colour(item.tone)
            # In the band alone: through the row's name it would be read as a letter.
            axis.plot([0, 0], band, color=colour("muted"), linewidth=1)
            if item.limit is not None:
                axis.fill_betweenx(band, edge, item.limit, color=colour("fail"), alpha=0.1, linewidth=0)
                axis.plot([item.limit] * 2, band, color=colour("fail"), linewidth=1.5)
            axis.plot(item.interval, [y, y], color=ink, linewidth=1.5)
            if item.bounds is not None:
                axis.plot(item.bounds, [y, y], color=ink, linewidth=6, solid_capstyle="butt", alpha=0.4)
            axis.plot([item.value], [y], "o", color=ink, markersize=8.5, markeredgecolor=colour("paper"),
                      markeredgewidth=1.5)  # fmt: skip
            row_title(axis, y, item.label, item.tail, width, above=21)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        plain_ticks(axis, x=max(3, width // 95))
        axis.set_xlabel(axis_label)
        return inline(drawing, name=name, label=label)


def _limits(rows: Sequence[Row], least: float) -> Span:
    values = [-least / 2, least / 2]
    for item in rows:
        spans = [item.interval, item.bounds]
        values += [end for span in spans if span is not None for end in span]
        values += [item.value] + ([] if item.limit is None else [item.limit])
    low, high = min(values), max(values)
    pad = 0.08 * (high - low)
    return low - pad, high + pad


_RADIUS = 8.5  # of a lettered mark, in pixels


@dataclass(frozen=True, slots=True)
class Spot:
    """A mark with a letter in a plane, with intervals in both directions; ``on_front`` says that nothing beats it."""

    letter: str
    x: float
    y: float
    tone: str
    on_front: bool
    x_range: Span | None = None
    y_range: Span | None = None


def plane(
    spots: Sequence[Spot],
    *,
    titles: tuple[str, str],
    least: tuple[float, float],
    width: int,
    name: str,
    origin: tuple[float, float] | None = None,
    stairs: bool = False,
) -> str:
    """Draw marks in a plane, as an inline SVG, those of the front on top and filled.

    ``titles`` and ``least`` are the titles and least spans of the x and the y axis, so that small differences are not
    blown up. ``origin`` is a point of comparison, drawn as a cross. ``stairs`` is for a plane where more of y at less x
    is better and nothing else counts: the front is a line above all that is beaten, and no mark is filled.
    """
    with figure(width, 330, (58, 14, 14, 46)) as (drawing, axis):
        across = [end for s in spots for end in (s.x, *(s.x_range or ()))]
        upwards = [end for s in spots for end in (s.y, *(s.y_range or ()))]
        if origin is not None:
            across.append(origin[0])
            upwards.append(origin[1])
            axis.axvline(origin[0], color=colour("muted"), linewidth=1)
            axis.axhline(origin[1], color=colour("muted"), linewidth=1)
        for values, span, setter in zip((across, upwards), least, (axis.set_xlim, axis.set_ylim), strict=True):
            middle, room = (min(values) + max(values)) / 2, max(max(values) - min(values), span)
            setter(middle - 0.6 * room, middle + 0.6 * room)
        axis.grid(color=colour("rule"))
        if stairs:
            front = sorted((s.x, s.y) for s in spots if s.on_front)
            xs, ys = [x for x, _ in front], [y for _, y in front]
            axis.step([xs[0], *xs, axis.get_xlim()[1]], [axis.get_ylim()[0], *ys, ys[-1]], where="post",
                      color=colour("candidate"), linewidth=1.6)  # fmt: skip
        ordered = sorted(spots, key=lambda spot: spot.on_front)
        true = [tuple(map(float, axis.transData.transform((spot.x, spot.y)))) for spot in ordered]
        shown = axis.transData.inverted().transform(apart(true, 2 * _RADIUS + 2))
        for spot, (x, y) in zip(ordered, shown, strict=True):
            ink, filled = colour(spot.tone), spot.on_front and not stairs
            for wide, high in ((spot.x_range, (spot.y, spot.y)), ((spot.x, spot.x), spot.y_range)):
                if wide is not None and high is not None:
                    axis.plot(wide, high, color=ink, linewidth=1.4, alpha=0.6, solid_capstyle="butt", zorder=2)
            axis.plot([x], [y], "o", markersize=2 * _RADIUS, markeredgecolor=ink, zorder=3,
                      markerfacecolor=ink if filled else colour("paper"), markeredgewidth=1.6)  # fmt: skip
            axis.annotate(spot.letter, (x, y), (0, -0.5), ha="center", va="center", fontsize=11, zorder=4,
                          textcoords="offset points", fontweight="bold",
                          color=colour("paper") if filled else ink)  # fmt: skip
        plain_ticks(axis, x=max(3, width // 90), y=5)
        axis.yaxis.set_major_formatter(lambda value, _: number(value) if value >= 1000 else f"{value:.4g}")
        axis.set_xlabel(titles[0])
        axis.set_ylabel(titles[1])
        legend = "; ".join(f"{s.letter}: {number(s.y)} at {number(s.x)}" for s in spots)
        return inline(drawing, name=name, label=f"{titles[1]} over {titles[0]}. {legend}")


def apart(places: Sequence[tuple[float, ...]], room: float) -> list[tuple[float, float]]:
    """Return where marks at (x, y) are drawn so that each can be read: a mark that would cover another moves right.

    `room` is the least distance of two marks, in the pixels of `places`. Their intervals stay where they are.
    """
    occupied: list[tuple[float, float]] = []
    for x, y in places:
        while (hidden := next((t for t in occupied if math.dist(t, (x, y)) < room), None)) is not None:
            x = hidden[0] + math.sqrt(max(room**2 - (y - hidden[1]) ** 2, 0.0)) + 1e-6
        occupied.append((x, y))
    return occupied
