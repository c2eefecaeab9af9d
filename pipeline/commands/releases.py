"""quantmint releases PLACE"""

from __future__ import annotations

from dataclasses import asdict

import click

from pipeline.commands.options import emit, json_option


@click.command(name="releases")
@click.argument("place")
@json_option
def command(place: str, as_json: bool) -> int:
    """List what is published in PLACE, the newest first, and which of it readers get.

    PLACE is a published folder (published/NAME), a bucket (s3://bucket/prefix/NAME) or a repository (org/name).
    """
    from pipeline.commands import operations
    from pipeline.publish.opening import open_target

    target = open_target(place)
    found = target.releases()
    if as_json:
        emit({"place": target.place, "releases": [asdict(release) for release in found]})
        return 0
    if not found:
        click.echo(f"nothing is published in {operations.shown(target.place)}", err=True)
        return 0
    from rich.markup import escape

    from pipeline.commands.tables import size, table, terminal

    made = table("tag", "date", "", "size", "title", right=("size",))
    for release in found:
        made.add_row(
            release.tag,
            f"{release.created[:16].replace('T', ' ')} UTC",
            "current" if release.current else "candidate" if release.candidate else "",
            "-" if release.size is None else size(release.size),
            escape("".join(letter for letter in release.title if letter.isprintable())),
        )
    terminal().print(made)
    return 0
