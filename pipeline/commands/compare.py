"""quantmint compare A B ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, store_option

if TYPE_CHECKING:
    from rich.console import Console

    from eval.comparison.model import Comparison, Contender, Group
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
    from pipeline.base.errors import UserError
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
        from pipeline.base.errors import shown_path

        click.echo(f"page  {shown_path(output.resolve())}")
    return 0


def _read(given: Sequence[str], store: Store) -> list[Contender]:
    from eval.comparison.model import read
    from eval.errors import MeasurementError
    from pipeline.base.errors import UserError
    from pipeline.stages.finished import find

    found = [find(name, store) for name in given]
    try:
        return [read(one.report, one.gate) for one in found]
    except MeasurementError as error:
        raise UserError(str(error), hint="`quantmint run` makes a report of this version") from None


def _write(output: Path, comparison: Comparison) -> None:
    from eval.comparison.page import render
    from pipeline.base.errors import UserError
    from pipeline.store.disk import write_atomic

    text = render(comparison).encode()
    try:
        write_atomic(output, text, temporary=output.with_name(f".{output.name}.partial"))
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from None


def _show(comparison: Comparison) -> None:
    from pipeline.commands.tables import terminal

    console = terminal()
    for warning in comparison.warnings:
        console.print(f"[yellow]note:[/] {_plain(warning)}")
    for group in comparison.groups:
        console.print(f"\n[bold]{_plain(group.model)}[/]  16 bit: {_plain(group.baseline[:12])}")
        _print_marks(console, group)
        _print_tasks(console, group)
        _print_speeds(console, group)
        _print_direct(console, group)
        for note in group.notes:
            console.print(f"[yellow]note:[/] {_plain(note)}")


def _print_marks(console: Console, group: Group) -> None:
    from eval.report.numbers import count, percent, ratio
    from pipeline.commands.tables import size, table

    who = table("", "checkpoint", "verdict", "measured on")
    figures = ("size", "of 16 bit", "recovery", "flips", "throughput", "KV tokens", "canary")
    made = table("", *figures, right=figures)
    for mark in group.marks:
        found = mark.contender
        canary = found.gate.canary
        letter = f"{mark.letter}{'*' if mark.on_front else ''}"
        place = f"{found.gate.hardware}, {found.gate.runtime}"
        who.add_row(letter, _plain(found.name), found.gate.verdict.value, _plain(place))
        made.add_row(
            letter,
            size(found.size[1]),
            ratio(found.size_ratio),
            "-" if mark.worst is None else percent(mark.worst.recovery),
            "-" if mark.worst is None else percent(mark.worst.flip_rate),
            "-" if mark.slowest is None else ratio(mark.slowest.ratio),
            "-" if found.kv_tokens is None else count(found.kv_tokens[1]),
            "-" if canary is None else percent(canary.agreement),
        )
    console.print(who)
    console.print(made)
    worst = _of_each({mark.letter: mark.worst.task for mark in group.marks if mark.worst is not None})
    cells = _of_each({mark.letter: mark.slowest.cell for mark in group.marks if mark.slowest is not None})
    said = [f"recovery and flips in the worst shared task ({worst})"] if worst else []
    said += [f"throughput in the load of the least gain ({cells})"] if cells else []
    if said:
        console.print(_plain("; ".join(said)))
    if any(mark.on_front for mark in group.marks):
        console.print("* nothing here beats it in recovery of the worst shared task, size and throughput together")


def _of_each(names: Mapping[str, str]) -> str:
    """One name that all letters share, or each letter's own."""
    if len(set(names.values())) < 2:
        return next(iter(names.values()), "")
    return ", ".join(f"{letter}: {name}" for letter, name in names.items())


def _print_tasks(console: Console, group: Group) -> None:
    from eval.report.numbers import unit_of
    from pipeline.commands.tables import table

    if not group.tasks:
        return
    numbers = ("change", "interval", "items")
    made = table("task", "", "verdict", *numbers, right=numbers)
    for row in group.tasks:
        for number, (mark, result) in enumerate(zip(group.marks, row.results, strict=True)):
            name = _plain(f"{row.task}, {row.metric}") if number == 0 else ""
            if result is None:
                made.add_row(name, mark.letter, "not asked")
                continue
            verdict = row.verdicts[number]
            made.add_row(
                name,
                mark.letter,
                "shown only" if verdict is None else verdict.value,
                unit_of(result.kind).words(result.difference),
                unit_of(result.kind).interval(result.interval_low, result.interval_high),
                f"{result.items:,}",
            )
    console.print(made)


def _print_speeds(console: Console, group: Group) -> None:
    from eval.comparison.model import where
    from eval.report.numbers import figure, ratio
    from pipeline.commands.tables import table

    for speeds in group.speeds:
        console.print(f"output tokens/s on {_plain(where(speeds.place))}")
        numbers = ("16 bit", "here", "ratio", "interval")
        made = table("load", "", *numbers, right=numbers)
        here = [number for number, mark in enumerate(group.marks) if mark.contender.place == speeds.place]
        for row in speeds.cells:
            for number in here:
                name, cell = _plain(row.cell) if number == here[0] else "", row.results[number]
                if cell is None:
                    made.add_row(name, group.marks[number].letter, "-")
                    continue
                interval = f"{ratio(cell.ratio_low)} … {ratio(cell.ratio_high)}" if cell.repeated else "one launch"
                before, after = figure(cell.baseline), figure(cell.candidate)
                made.add_row(name, group.marks[number].letter, before, after, ratio(cell.ratio), interval)
        console.print(made)


def _print_direct(console: Console, group: Group) -> None:
    from eval.comparison.model import better
    from eval.report.numbers import unit_of
    from pipeline.commands.tables import table

    if not group.direct:
        return
    console.print("the same items, answered by both")
    numbers = ("difference", "interval", "items")
    made = table("", "task", *numbers, "", right=numbers)
    for direct in group.direct:
        pair = f"{group.marks[direct.second].letter} vs {group.marks[direct.first].letter}"
        for result in direct.results:
            unit = unit_of(result.kind)
            interval = unit.interval(result.interval_low, result.interval_high)
            change = unit.words(result.difference)
            made.add_row(pair, _plain(result.task), change, interval, f"{result.items:,}", better(result))
        for reason in direct.unknown:
            made.add_row(pair, "", "", "", "", _plain(reason))
    console.print(made)


def _plain(text: str) -> str:
    """Text of a report that anybody may have written: no markup of ours, nothing that moves a cursor."""
    from rich.markup import escape

    return escape("".join(letter for letter in text if letter.isprintable()))
