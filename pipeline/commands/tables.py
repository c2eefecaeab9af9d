"""What commands print for people."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pipeline.stages.cost import Forecast


_WIDE = 140
_READABLE = 120


def terminal() -> Console:
    """Standard output. A file has no edge to cut at: who reads it later gets whole figures."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    return console


def paragraph(console: Console, head: str, text: str) -> str:
    """`head` and prose beside it, wrapped at a terminal's edge; one line in a file, for programs that read lines."""
    if not console.is_terminal:
        return head + text
    width = max(min(console.width, _READABLE), len(head) + 20)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def table(*columns: str, right: Collection[str] = ()) -> Table:
    """A table in the house's style."""
    made = Table(box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        # The first column is what people copy; the last one may be prose.
        prose = number == len(columns) - 1 and column not in right
        made.add_column(column, justify="right" if column in right else "left", no_wrap=not prose, overflow="fold")
    return made


def size(count: int) -> str:
    """Bytes for people: decimal units, as disks are sold."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people; two digits of anything predicted are enough."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:,.1f} h"


def print_costs(console: Console, costs: Forecast) -> None:
    """What the stages that work on weights take, and whose rates that was computed from."""
    if not costs.stages:
        console.print("how long a library takes to quantize is not predicted")
        return
    stages = table("stage", "time", "memory", "device", "disk", "mostly", right=("time", "memory", "device", "disk"))
    for stage, cost in costs.stages.items():
        stages.add_row(
            stage if cost.mode is None else f"{stage}, {cost.mode}",
            duration(cost.seconds),
            size(cost.memory),
            size(cost.device_memory) if cost.device_memory else "-",
            size(cost.disk),
            _BOUNDS[cost.bound],
        )
    console.print(stages)
    console.print(f"times on {escape(costs.machine)}: {_ORIGINS[costs.origin]}")


_BOUNDS = {
    "cores": "the cores are busy",
    "hash": "a file's SHA-256",
    "device": "the device computes",
    "link": "the bus to the device",
    "disk": "reading the disk",
    "sync": "writing the disk",
    "load": "loading weights",
    "products": "matrix products",
    "scores": "attention's softmax",
    "spill": "hidden states on the disk",
}
_ORIGINS = {
    "table": "by the rates of such machines",
    "borrowed": "by that machine's rates, for nothing is known of this one",
}
