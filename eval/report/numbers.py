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
    """Bytes in decimal units, as disks and the Hub count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{three(count)} {unit}"
        count /= 1000
    return f"{three(count)} TB"


def three(value: float) -> str:
    """Three significant digits, zeros included."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def figure(value: float | None) -> str:
    """A measured value; a dash where there is none."""
    if value is None:
        return DASH
    return signs(three(value)) if value else "0"


def count(value: float | None) -> str:
    """A whole number with thousands set apart; a dash where there is none."""
    return DASH if value is None else f"{round(value):,}"


def duration(seconds: float) -> str:
    """Seconds, or minutes, or hours with minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def signed(value: float, digits: int = 2) -> str:
    """A change with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def percent(fraction: float | None, digits: int = 1) -> str:
    """A share in per cent; a dash where there is none."""
    return DASH if fraction is None else signs(f"{100 * fraction:.{digits}f}{PER_CENT}")


def ratio(value: float) -> str:
    """A factor."""
    return f"{value:.2f}{TIMES}"


def p_value(value: float | None) -> str:
    """A p-value; very small ones as a bound."""
    if value is None:
        return DASH
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def signs(text: str) -> str:
    """Numbers in a sentence with a real minus sign."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a change of accuracy: points of a score; per cent of a perplexity, of which more is worse.

    Differences are those of `Accuracy.difference`, below 0 is worse.
    """

    name: str
    perplexity: bool

    def scale(self, difference: float) -> float:
        """A difference in the unit."""
        return change("perplexity" if self.perplexity else "graded", max(-20.0, min(20.0, difference)))

    def span(self, low: float, high: float) -> tuple[float, float]:
        """An interval of differences in the unit, the lower end first."""
        ends = (self.scale(low), self.scale(high))
        return (min(ends), max(ends))

    def margin(self, margin: float) -> float:
        """Return a margin's place: -1 for a loss of one point, +2 for a perplexity of two per cent more."""
        return 100 * margin if self.perplexity else -100 * margin

    def words(self, difference: float) -> str:
        """A difference with its unit."""
        return f"{signed(self.scale(difference))}{PER_CENT if self.perplexity else POINT}"

    def margin_words(self, margin: float) -> str:
        """A margin with its unit."""
        return f"{signed(self.margin(margin))}{PER_CENT if self.perplexity else POINT}"

    def interval(self, low: float, high: float) -> str:
        """An interval of differences, the lower end first."""
        ends = self.span(low, high)
        return f"{signed(ends[0])} \N{HORIZONTAL ELLIPSIS} {signed(ends[1])}"


def unit_of(kind: str) -> Unit:
    """The unit that a task's change is shown in, by its `Accuracy.kind`."""
    perplexity = kind == "perplexity"
    name = "change in perplexity, % (left is better)" if perplexity else "change in accuracy, points (right is better)"
    return Unit(name, perplexity)


def level(result: Accuracy, value: float) -> str:
    """A score in per cent, or a perplexity."""
    return three(value) if result.kind == "perplexity" else percent(value, 2)


def tone(verdict: Verdict | None) -> str:
    """The colour of a verdict; of what is shown only, a quiet one."""
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
