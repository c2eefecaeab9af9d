"""What each section of the page shows, from a report: figures in order, and plots for wide and narrow screens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

WIDE, NARROW = 760, 340
"""Widths in CSS pixels that plots are drawn for; the style sheet shows the one that fits."""


def drawn(draw: Callable[..., str], name: str, *, wide: int = WIDE) -> Markup:
    """A plot for wide and for narrow screens. ``draw`` takes the width and the prefix of the ids."""
    from markupsafe import Markup

    both = (
        f'<div class="wide">{draw(width=wide, name=f"{name}-w")}</div>'
        f'<div class="narrow">{draw(width=NARROW, name=f"{name}-n")}</div>'
    )
    return Markup(both)  # noqa: S704 - our own SVG, whose text matplotlib escapes
