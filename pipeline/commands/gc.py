"""quantmint gc"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option


@click.command(name="gc")
@click.option("--keep", type=click.IntRange(min=0), default=3, show_default=True, help="Runs of each recipe to keep.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@store_option
@json_option
def command(keep: int, dry_run: bool, store_path: Path, as_json: bool) -> int:
    """Remove what none of the newest runs of any recipe uses. What was published is not touched."""
    from pipeline.commands.tables import size
    from pipeline.store.gc import apply, plan_gc
    from pipeline.store.tree import Store

    plan = plan_gc(Store(store_path), keep=keep)
    freed = plan.freed_bytes if dry_run else apply(plan)
    if as_json:
        items = [{"path": str(item.path), "bytes": item.bytes, "why": item.why} for item in plan.remove]
        emit({"removed": items, "freed_bytes": freed, "dry_run": dry_run})
        return 0
    for item in plan.remove:
        click.echo(f"{size(item.bytes):>10}  {item.path}  {item.why}")
    click.echo(f"{'would free' if dry_run else 'freed'} {size(freed)}")
    return 0
