"""Changes of accuracy as people read them: points of a score, per cent of a perplexity."""

from __future__ import annotations

from eval.accuracy import Accuracy, margin_in_units
from eval.accuracy import change as change
from eval.report.numbers import signed


def margin(kind: str, accepted: float) -> float:
    """Where a margin stands among changes: -1 for a loss of one point, +2 for a perplexity of two per cent more."""
    return change(kind, -margin_in_units(kind, accepted))


def difference(result: Accuracy) -> str:
    """The measured change with its unit."""
    return f"{signed(change(result.kind, result.difference))} {unit(result.kind)}"


def unit(kind: str) -> str:
    """The unit of `change`."""
    return "%" if kind == "perplexity" else "pt"


def interval(kind: str, low: float, high: float) -> str:
    """Bounds of a difference as changes, the lower first."""
    ends = sorted((change(kind, low), change(kind, high)))
    return f"{signed(ends[0])} … {signed(ends[1])}"


def score(kind: str, value: float) -> str:
    """A mean score in per cent; a perplexity as it is."""
    return f"{value:.3f}" if kind == "perplexity" else f"{100 * value:.2f} %"
