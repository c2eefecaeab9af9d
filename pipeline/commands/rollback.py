"""quantmint rollback PLACE TAG"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option


@click.command(name="rollback")
@click.argument("place")
@click.argument("tag")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def command(place: str, tag: str, dry_run: bool, as_json: bool) -> int:
    """Make TAG, an earlier release in PLACE, what readers get again, byte by byte.

    Nothing is removed: the release that it replaces can be rolled back to in the same way.
    """
    from pipeline.commands import operations
    from pipeline.progress import reporter_for
    from pipeline.publish.opening import open_target

    target = open_target(place)
    done = target.rollback(tag, dry_run=dry_run, progress=reporter_for(json=as_json))
    if as_json:
        emit({"place": target.place, "tag": tag, "dry_run": dry_run, "operations": operations.as_json(done)})
        return 0
    operations.show(done)
    if not done:
        click.echo(f"{tag} is the current release of {operations.shown(target.place)} already")
    elif not dry_run:
        click.echo(f"current  {tag} of {operations.shown(target.place)}")
    return 0
