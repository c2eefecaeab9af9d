"""quantmint prune PLACE --keep N"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option


@click.command(name="prune")
@click.argument("place")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="The newest N releases stay.")
@click.option("--older-than", type=click.IntRange(min=0), metavar="DAYS", help="Only those made longer ago than that.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def command(place: str, keep: int, older_than: int | None, dry_run: bool, as_json: bool) -> int:
    """Remove old releases from PLACE, never the current one or a candidate."""
    from datetime import UTC, datetime, timedelta

    from pipeline.commands import operations
    from pipeline.progress import reporter_for
    from pipeline.publish.opening import open_target
    from pipeline.publish.retention import outdated

    target = open_target(place)
    age = None if older_than is None else timedelta(days=older_than)
    tags = outdated(target.releases(), keep=keep, older_than=age, now=datetime.now(UTC))
    done = target.remove(tags, dry_run=dry_run, progress=reporter_for(json=as_json)) if tags else ()
    if as_json:
        told = {"place": target.place, "removed": list(tags), "dry_run": dry_run}
        emit({**told, "operations": operations.as_json(done)})
        return 0
    operations.show(done)
    if not tags:
        click.echo(f"{operations.shown(target.place)} has no release to remove")
    return 0
