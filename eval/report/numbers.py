"""Format figures: three digits, real minus and multiplication signs, units that people use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantmint.eval.accuracy import Accuracy, change
from quantmint.eval.verdict import Verdict

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NO_BREAK = "\N{NO-BREAK SPACE}"
PER_CENT = f"{NO_BREAK}%"
POINT = f"{NO_BREAK}pt"
ARROW = "\N{RIGHTWARDS ARROW}"


def size(count: float) -> str:
    """Return a number of bytes in a decimal unit, as disks and the Hub count: whole bytes below 1000, else kB to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{three(count)} {unit}"
        count /= 1000
    return f"{three(count)} TB"


def three(value: float) -> str:
    """Return a number with three significant digits, zeros included; from 1000 on all digits before the point."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def figure(value: float | None) -> str:
    """Return a measured value with three significant digits; a dash for None."""
    if value is None:
        return DASH
    return signs(three(value)) if value else "0"


def count(value: float | None) -> str:
    """Return a number, rounded to a whole one, with thousands set apart; a dash for None."""
    return DASH if value is None else f"{round(value):,}"


def duration(seconds: float) -> str:
    """Return a duration in seconds, in minutes and seconds, or from one hour on in hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign, also a plus."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return a share of 1 in per cent; a dash for None."""
    return DASH if fraction is None else signs(f"{100 * fraction:.{digits}f}{PER_CENT}")


def ratio(value: float) -> str:
    """Return a factor with two decimals and a multiplication sign."""
    return f"{value:.2f}{TIMES}"


def p_value(value: float | None) -> str:
    """Return a p-value, below 0.0001 as "< 0.0001"; a dash for None."""
    if value is None:
        return DASH
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def signs(text: str) -> str:
    """Return text with a minus sign instead of the hyphen before each negative number."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a change of accuracy: points of a score, or per cent of a perplexity, where more is worse.

    Methods take differences as in `Accuracy.difference`, where below 0 is worse.
    """

    name: str
    perplexity: bool

    def scale(self, difference: float) -> float:
        """Return a difference in this unit, cut off at differences of -20 and 20."""
        return change("perplexity" if self.perplexity else "graded", max(-20.0, min(20.0, difference)))

    def span(self, low: float, high: float) -> tuple[float, float]:
        """Return the interval between two differences in this unit, the lower end first."""
        ends = (self.scale(low), self.scale(high))
        return (min(ends), max(ends))

    def margin(self, margin: float) -> float:
        """Return a margin's place on this unit's axis: -1 for a loss of one point, +2 for a perplexity 2 % higher."""
        return 100 * margin if self.perplexity else -100 * margin

    def words(self, difference: float) -> str:
        """Return a difference as text, with its sign and unit."""
        return f"{signed(self.scale(difference))}{PER_CENT if self.perplexity else POINT}"

    def margin_words(self, margin: float) -> str:
        """Return a margin as text, with the sign of the loss and the unit."""
        return f"{signed(self.margin(margin))}{PER_CENT if self.perplexity else POINT}"

    def interval(self, low: float, high: float) -> str:
        """Return the interval between two differences as text, the lower end first, without the unit."""
        ends = self.span(low, high)
        return f"{signed(ends[0])} \N{HORIZONTAL ELLIPSIS} {signed(ends[1])}"


def unit_of(kind: str) -> Unit:
    """Return the unit for a task's change, by its `Accuracy.kind`."""
    perplexity = kind == "perplexity"
    name = "change in perplexity, % (left is better)" if perplexity else "change in accuracy, points (right is better)"
    return Unit(name, perplexity)


def level(result: Accuracy, value: float) -> str:
    """Return a score in per cent, or a perplexity with three digits, by the kind of `result`."""
    return three(value) if result.kind == "perplexity" else percent(value, 2)


def tone(verdict: Verdict | None) -> str:
    """Return the name of the page's colour for a verdict; "muted" for None, a task that is shown only."""
    return verdict.value.lower() if verdict else "muted"


FILTERS = {
    "size": size,
    "duration": duration,
    "signed": signed,
    "percent": percent,
    "figure": figure,
    "count": count,
    "ratio": ratio,
    "p_value": p_value,
    "signs": signs,
}
