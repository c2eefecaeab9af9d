"""Markdown in pieces: what is Markdown says so by its type, and all other text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from eval.report import markdown

_FEW: Final = 12


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escaped(value: object) -> str:
    """A value as Markdown that shows exactly it."""
    return value if isinstance(value, Markdown) else markdown.plain(str(value))


def code(text: str, *, cell: bool = False) -> Markdown:
    """Text as code on one line, whatever backticks are in it; in a ``cell`` of a table a bar needs a backslash."""
    flat, ticks = " ".join(text.split()), "`"
    while ticks in flat:
        ticks += "`"
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return Markdown(f"{ticks}{pad}{flat.replace('|', chr(92) + '|') if cell else flat}{pad}{ticks}")


def codes(names: Iterable[str]) -> Markdown:
    """Names as code in a cell, the first of many."""
    known = list(names)
    more = f" and {len(known) - _FEW} more" if len(known) > _FEW else ""
    return Markdown(", ".join(code(name, cell=True) for name in known[:_FEW]) + more)


def block(lines: str | Sequence[str], language: str = "sh") -> Markdown:
    """Commands as a block of code."""
    return Markdown(markdown.fenced(lines if isinstance(lines, str) else "\n".join(lines), language))


def link(text: str, address: str) -> Markdown:
    """A link to the web or to a file beside the card; an address that is neither, or could end the link, as text."""
    outside = address.startswith("https://")
    if any(char.isspace() or char in "<>()\\" for char in address) or (":" in address and not outside):
        return Markdown(f"{escaped(text)} ({escaped(address)})")
    return Markdown(f"[{escaped(text)}]({address})")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markdown:
    """A table of text; cells are Markdown already, or are escaped."""
    lines = [head, [":--"] * len(head), *[[escaped(cell) for cell in row] for row in rows]]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))
