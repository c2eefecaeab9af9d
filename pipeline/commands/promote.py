"""quantmint promote PLACE [TAG]"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option


@click.command(name="promote")
@click.argument("place")
@click.argument("tag", required=False)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def command(place: str, tag: str | None, dry_run: bool, as_json: bool) -> int:
    """Make a candidate in PLACE what readers get; TAG says which one where several wait.

    Its files were sent when it was published: none is sent again. `quantmint rollback` undoes it.
    """
    from pipeline.commands import operations
    from pipeline.progress import reporter_for
    from pipeline.publish.opening import open_target

    target = open_target(place)
    done = target.promote(tag, dry_run=dry_run, progress=reporter_for(json=as_json))
    if as_json:
        emit({"place": target.place, "dry_run": dry_run, "operations": operations.as_json(done)})
        return 0
    operations.show(done)
    if not done:
        click.echo(f"{tag} is the current release of {operations.shown(target.place)} already")
    elif not dry_run:
        current = next((release.tag for release in target.releases() if release.current), None)
        click.echo(f"current  {current or '-'} of {operations.shown(target.place)}")
    return 0
