"""quantmint site"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option


@click.command(name="site")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("site"),
    show_default=True,
    help="Folder of the site; what is there is brought up to date.",
)
@store_option
@json_option
def command(output: Path, store_path: Path, as_json: bool) -> int:
    """Render an index of all runs with their reports: plain files for any web server, or to be opened from the disk.

    Runs that the store has forgotten stay in the index; delete the folder to begin anew.
    """
    from pipeline.progress import reporter_for
    from pipeline.recipe.faults import shown_path
    from pipeline.site.build import INDEX, build
    from pipeline.store.tree import Store

    reporter = reporter_for(json=as_json)
    built = build(output, Store(store_path, on_warning=reporter.warn), on_warning=reporter.warn)
    page = (output / INDEX).resolve()
    if as_json:
        emit({"page": str(page), "copied": built.copied, "runs": [row.to_json() for row in built.rows]})
        return 0
    click.echo(f"{len(built.rows)} runs, {built.copied} new reports")
    click.echo(f"page  {shown_path(page)}")
    return 0
