"""What commands print for people."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.gate.reach import Reach
from pipeline.cost.forecast import Forecast
from pipeline.prediction import Prediction
from pipeline.stage import Planned, Setting

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
    "probed": "by rates that were probed here",
    "table": "by the rates of such machines; --probe measures this one",
    "borrowed": "by that machine's rates, for nothing is known of this one; --probe measures it",
}


def print_plan(
    setting: Setting,
    plan: Sequence[Planned],
    missing: Collection[str],
    prediction: Prediction,
    costs: Forecast,
    needed: Mapping[str, int],
    free: int,
    told: Reach,
    notes: Sequence[str],
) -> None:
    """The plan as tables."""
    console = terminal()
    recipe = setting.recipe
    source = recipe.source.repo or recipe.source.folder
    console.print(f"[bold]{recipe.name}[/]  {escape(recipe.description)}")
    console.print(
        f"{escape(str(source))} -> {recipe.quantization.scheme}, KV cache {recipe.quantization.kv_cache}, "
        f"{recipe.quantization.format}, for {recipe.target.gpus} x {recipe.target.hardware}"
    )
    stages = table("stage", "state", "fingerprint")
    for planned in plan:
        state = "to do" if planned.key in missing else "cached"
        stages.add_row(planned.key, state, planned.fingerprint[:12])
    console.print(stages)
    ratio = prediction.source / prediction.checkpoint
    sizes = table("what", "size", right=("size",))
    sizes.add_row("16-bit model", size(prediction.source))
    sizes.add_row(
        f"checkpoint ({prediction.quantized} modules quantized, {prediction.kept} kept, {ratio:.2f} x smaller)",
        size(prediction.checkpoint),
    )
    sizes.add_row("weights on each GPU", size(prediction.weights_per_gpu))
    if prediction.kv_bytes_per_token is not None:
        sizes.add_row("KV cache for one token, all layers", size(prediction.kv_bytes_per_token))
    for name, count in needed.items():
        sizes.add_row(f"disk: {name}", size(count))
    sizes.add_row("disk: free", size(free))
    console.print(sizes)
    print_costs(console, costs)
    print_reach(console, told)
    for note in notes:
        console.print(f"[yellow]caution:[/] {escape(note)}")


def print_reach(console: Console, told: Reach) -> None:
    """What the gate can tell: a loss by task, after which items, and a change of speed."""
    numbers = ("items", "margin", "detectable", "looks", "asked, about")
    tests = table("task", *numbers, right=numbers)
    for name, task in told.tasks.items():
        tests.add_row(
            name,
            f"{task.items:,}",
            "shown only" if task.margin is None else f"{task.margin:.2%}",
            f"{task.detectable:.2%}",
            f"{len(task.looks)}",
            "-" if task.expected is None else f"{task.expected:,}",
        )
    console.print(tests)
    console.print(
        "detectable: the least margin that so many items can test; asked: how many of them a lossless candidate "
        "is asked on average, because clear cases stop early"
    )
    speed = told.speed
    if speed is not None and speed.detectable_spreads is not None:
        promise = f"throughput of at least {speed.min_ratio:g} x the baseline's"
        launches = f"{speed.launches} launches a side ({speed.fewest} at the fewest)"
        console.print(
            f"{promise}: {launches} show a change of {speed.detectable_spreads:.1f} standard deviations of a launch"
        )
