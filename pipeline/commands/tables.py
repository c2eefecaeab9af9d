"""Print tables and paragraphs for people."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantmint.eval.report.numbers import duration, size

if TYPE_CHECKING:
    from quantmint.pipeline.runs.weights import WeightForecast

_WIDE = 140
_READABLE = 120
_ORIGINS = {
    "table": "estimated with rates that were measured on a machine of this kind",
    "measured": "copying, hashing, loading, products and rounding were measured for a second; the rest is the other's",
    "data sheet": "nobody has measured it; estimated from its data sheet, at an H100's efficiency",
    "borrowed": "that is ANOTHER machine: this one could not be measured, and may be many times faster or slower",
}


def terminal() -> Console:
    """Return the console of standard output; into a file it is wide enough that no figure is cut."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    return console


def paragraph(console: Console, head: str, text: str) -> str:
    """Return `head` with prose beside it, wrapped at the terminal's edge; one line where the output is a file."""
    if not console.is_terminal:
        return head + text
    width = max(min(console.width, _READABLE), len(head) + 20)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def plain(text: str) -> str:
    """Return foreign text safe to print with rich: no markup, one line, no control characters."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Return foreign text on one line, with unprintable characters, such as those that move a cursor, replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


class _Table(Table):
    """A table that prints each row as a paragraph where the terminal is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = 3 * len(self.columns) - 1  # what stands between columns
        for column in self.columns:
            cells = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
            least += max(map(cell_len, cells if column.no_wrap else " ".join(cells).split()), default=0)
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for head, *cells in zip(*(column.cells for column in self.columns), strict=True):
            named = zip((f"{column.header}" for column in self.columns[1:]), cells, strict=True)
            yield Text.from_markup(f"[bold]{head}[/]")
            yield Padding(
                "; ".join(f"[dim]{name}[/] {cell}".strip() for name, cell in named if cell), (0, 0, 0, 2), expand=False
            )


def table(*columns: str, right: Collection[str] = (), rows: Iterable[Iterable[str]] = ()) -> Table:
    """Return a table in the house style; cells of `rows` are rich markup, columns in `right` are right-aligned."""
    table_ = _Table(box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        # The first column is what people copy; the last one may be prose.
        prose = number == len(columns) - 1 and column not in right
        table_.add_column(column, justify="right" if column in right else "left", no_wrap=not prose, overflow="fold")
    for row in rows:
        table_.add_row(*row)
    return table_


def print_outlook(console: Console, sizes: Mapping[str, int | None], forecast: WeightForecast) -> None:
    """Print sizes in bytes, the costs of the stages that work on weights, and the origin of the machine's rates."""
    rows_ = [(what, size(count)) for what, count in sizes.items() if count is not None]
    console.print(table("what", "size", right=("size",), rows=rows_))
    if not forecast.stages:
        console.print("how long a library takes to quantize is not predicted")
        return
    rows = [
        (
            stage if cost.mode is None else f"{stage}, {cost.mode}",
            duration(cost.seconds),
            size(cost.memory),
            size(cost.device_memory) if cost.device_memory else "-",
            size(cost.disk),
        )
        for stage, cost in forecast.stages.items()
    ]
    right = ("time", "memory", "device", "disk")
    console.print(table("stage", *right, right=right, rows=rows))
    console.print(f"times on {escape(forecast.rates.machine)}: {_ORIGINS[forecast.origin]}")
