"""quantmint schemes"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option


@click.command(name="schemes")
@click.option(
    "--markdown",
    "document",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the table into this file, between the lines that mark it; - prints it.",
)
@json_option
def command(document: Path | None, as_json: bool) -> int:
    """List the schemes: what they store, which engines make them in each layout, and where they run as they are.

    An FP8 KV cache goes with every scheme; its scales are calibrated.
    """
    from pipeline.scheme_table import COLUMNS, markdown, refresh, scheme_rows

    if document is not None:
        if str(document) == "-":
            click.echo(markdown())
            return 0
        try:
            changed = refresh(document)
        except (ValueError, OSError) as error:
            raise click.UsageError(f"--markdown: {document}: {error}") from None
        click.echo(f"{document}: {'written' if changed else 'up to date'}")
        return 0
    rows = scheme_rows()
    if as_json:
        emit([row.to_json() for row in rows])
        return 0
    from rich.console import Console

    from pipeline.commands.tables import table as make

    shown = make(*COLUMNS, right=("bits",))
    for column in shown.columns[2:]:
        column.no_wrap = False  # only the name must stay in one piece on a narrow terminal
    for row in rows:
        shown.add_row(*row.cells())
    Console(highlight=False).print(shown)
    return 0
