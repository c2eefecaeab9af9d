"""quantmint compare A B ..."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, store_option

if TYPE_CHECKING:
    from rich.console import Console

    from eval.comparison.contender import Contender
    from eval.comparison.model import Comparison, Group
    from pipeline.store.tree import Store


@click.command(name="compare")
@click.argument("finished", nargs=-1, required=True, metavar="A B ...")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.html", help="Write the page there."
)
@store_option
@json_option
def command(finished: tuple[str, ...], output: Path | None, store_path: Path, as_json: bool) -> int:
    """Put checkpoints side by side: accuracy against size against throughput.

    A, B, ... are published folders, report.json files, reports in the store, or names of recipes that were run.
    """
    from eval.comparison.model import side_by_side, to_json
    from pipeline.errors import UserError
    from pipeline.store.tree import Store

    if len(finished) < 2:
        raise UserError(f"found one checkpoint, {finished[0]}, expected at least two to compare")
    comparison = side_by_side(_read(finished, Store(store_path)))
    if output is not None:
        _write(output, comparison)
    if as_json:
        emit({**to_json(comparison), "page": None if output is None else str(output.resolve())})
        return 0
    _show(comparison)
    if output is not None:
        from pipeline.runner import relative

        click.echo(f"page  {relative(output.resolve())}")
    return 0


def _read(given: Sequence[str], store: Store) -> list[Contender]:
    from eval.comparison.contender import read
    from eval.errors import MeasurementError
    from pipeline.errors import UserError
    from pipeline.finished import find

    found = [find(name, store) for name in given]
    try:
        return [read(one.report, one.gate) for one in found]
    except MeasurementError as error:
        raise UserError(str(error), hint="`quantmint run` makes a report of this version") from None


def _write(output: Path, comparison: Comparison) -> None:
    from eval.comparison.page import render
    from pipeline.errors import UserError
    from pipeline.store.disk import write_atomic

    text = render(comparison).encode()
    try:
        write_atomic(output, text, temporary=output.with_name(f".{output.name}.partial"))
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from None


def _show(comparison: Comparison) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for warning in comparison.warnings:
        console.print(f"[yellow]note:[/] {_plain(warning)}")
    for group in comparison.groups:
        console.print(f"\n[bold]{_plain(group.model)}[/]  {_plain(group.baseline[:60])}")
        _print_marks(console, group)
        _print_tasks(console, group)
        _print_speeds(console, group)
        _print_direct(console, group)
        for note in group.notes:
            console.print(f"[yellow]note:[/] {_plain(note)}")


def _print_marks(console: Console, group: Group) -> None:
    from eval.report.numbers import count, percent, ratio
    from pipeline.commands.tables import size, table

    made = table(
        "", "checkpoint", "verdict", "size", "worst task", "flips", "throughput", "KV tokens", "canary", "measured on"
    )
    for mark in group.marks:
        found = mark.contender
        canary = found.gate.canary
        made.add_row(
            f"{mark.letter}{'*' if mark.on_front else ''}",
            _plain(found.name),
            found.gate.verdict.value,
            f"{ratio(found.size_ratio)} {size(found.size[1])}",
            "-" if mark.worst is None else f"{percent(mark.worst.recovery)} {_plain(mark.worst.task)}",
            "-" if mark.worst is None else percent(mark.worst.flip_rate),
            "-" if mark.slowest is None else f"{ratio(mark.slowest.ratio)} {_plain(mark.slowest.cell)}",
            "-" if found.kv_tokens is None else count(found.kv_tokens[1]),
            "-" if canary is None else percent(canary.agreement),
            _plain(f"{found.gate.hardware}, {found.gate.runtime}"),
        )
    console.print(made)
    if any(mark.on_front for mark in group.marks):
        console.print("* nothing here beats it in recovery of the worst shared task, size and throughput together")


def _print_tasks(console: Console, group: Group) -> None:
    from eval.comparison import words
    from pipeline.commands.tables import table

    if not group.tasks:
        return
    made = table("task", *(mark.letter for mark in group.marks))
    for row in group.tasks:
        cells = []
        for result in row.results:
            ends = result and words.interval(result.kind, result.interval_low, result.interval_high)
            cells.append(f"{words.difference(result)} ({ends})" if result else "not asked")
        made.add_row(_plain(f"{row.task}, {row.metric}"), *cells)
    console.print(made)


def _print_speeds(console: Console, group: Group) -> None:
    from eval.comparison.model import where
    from eval.report.numbers import ratio
    from pipeline.commands.tables import table

    for speeds in group.speeds:
        here = [number for number, mark in enumerate(group.marks) if mark.contender.place == speeds.place]
        made = table(f"tokens/s on {_plain(where(speeds.place))}", *(group.marks[number].letter for number in here))
        for row in speeds.cells:
            cells = [row.results[number] for number in here]
            made.add_row(
                _plain(row.cell),
                *(
                    "-" if cell is None else f"{ratio(cell.ratio)} ({ratio(cell.ratio_low)} … {ratio(cell.ratio_high)})"
                    for cell in cells
                ),
            )
        console.print(made)


def _print_direct(console: Console, group: Group) -> None:
    from eval.comparison import words
    from eval.comparison.direct import word
    from pipeline.commands.tables import table

    if not group.direct:
        return
    made = table("against", "task", "difference", "interval", "items", "")
    for direct in group.direct:
        pair = f"{group.marks[direct.second].letter} against {group.marks[direct.first].letter}"
        for result in direct.results:
            interval = words.interval(result.kind, result.interval_low, result.interval_high)
            made.add_row(
                pair, _plain(result.task), words.difference(result), interval, f"{result.items:,}", word(result)
            )
        for reason in direct.unknown:
            made.add_row(pair, "", "", "", "", _plain(reason))
    console.print(made)


def _plain(text: str) -> str:
    """Text of a report that anybody may have written: no markup of ours, nothing that moves a cursor."""
    from rich.markup import escape

    return escape("".join(letter for letter in text if letter.isprintable()))
