"""What the plots share: places of panels in pixels, ticks, and text that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.svg import colour

LETTER = 0.6
"""Mean width of a letter, in units of the font size."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Panels of equal size in pixels: room for the ticks at the left of and below each, and for a title above."""

    width: int
    columns: int
    panels: int
    panel_height: int
    left: int = 48
    right: int = 12
    top: int = 30
    bottom: int = 42
    head: int = 0

    @property
    def rows(self) -> int:
        """How many rows of panels there are."""
        return -(-self.panels // self.columns)

    @property
    def height(self) -> int:
        """Height of the whole figure."""
        return self.head + self.rows * (self.top + self.panel_height + self.bottom)

    def place(self, axes: Sequence[Any]) -> list[Any]:
        """Put the axes where the panels are; axes without a panel are hidden. Returns those that have one."""
        cell = self.width / self.columns
        for number, axis in enumerate(axes):
            row, column = divmod(number, self.columns)
            low = self.height - self.head - row * (self.top + self.panel_height + self.bottom)
            low -= self.top + self.panel_height
            box = (column * cell + self.left, low, cell - self.left - self.right, self.panel_height)
            sides = (self.width, self.height) * 2
            axis.set_position([side / whole for side, whole in zip(box, sides, strict=True)])
            axis.set_visible(number < self.panels)
        return list(axes[: self.panels])


def title(axis: Any, text: str, *, size: float = 13, left: int = 0) -> None:
    """A bold title above an axis, from its left edge or ``left`` pixels before it."""
    axis.annotate(text, (0, 1), (-left, 12), xycoords="axes fraction", textcoords="offset points", fontsize=size,
                  fontweight="bold", color=colour("ink"), va="center")  # fmt: skip


def number(value: float) -> str:
    """A tick or a value: three digits, thousands with commas."""
    if value == 0:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def locator(most: int, *, integer: bool = False) -> Any:
    """Ticks at round numbers, at most so many intervals."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(max(1, most), integer=integer, steps=[1, 2, 2.5, 5, 10])


def whole_ticks(numbers: Sequence[int], most: int) -> list[int]:
    """Round numbers among consecutive ones, at most so many; all where there is room for them."""
    if len(numbers) <= most:
        return list(numbers)
    ticks = locator(most, integer=True).tick_values(numbers[0], numbers[-1])
    return [round(tick) for tick in ticks if numbers[0] <= tick <= numbers[-1]]


def plain_ticks(axis: Any, *, x: int | None = None, y: int | None = None) -> None:
    """Few ticks, written out, without marks; None leaves a direction alone."""
    if x is not None:
        axis.xaxis.set_major_locator(locator(x))
        axis.xaxis.set_major_formatter(lambda value, _: number(value))
    if y is not None:
        axis.yaxis.set_major_locator(locator(y))
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
    axis.tick_params(length=0)


def at_values(axis: Any, values: Sequence[float], room: float) -> None:
    """Ticks at these values of a logarithmic x axis, leaving out those that would collide in ``room`` pixels."""
    import math

    low, high = axis.get_xlim()
    scale = room / math.log(high / low)
    kept: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not kept or math.log(kept[-1] / value) * scale >= 12 * LETTER * (len(number(value)) + 1.5):
            kept.append(value)
    axis.set_xticks(kept[::-1], [number(value) for value in kept[::-1]])
    axis.minorticks_off()


def shorten(text: str, pixels: float, size: float) -> str:
    """The text, or its two ends with an ellipsis between them where it is too wide for the pixels."""
    letters = max(4, int(pixels / (LETTER * size)))
    if len(text) <= letters:
        return text
    tail = letters // 3
    return f"{text[: letters - tail - 1]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"
