"""quantmint schedule list [RECIPES]"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option

_SHOWN = 3
_MISSED = {"run": "run once, later", "skip": "left out"}


@click.command(name="list")
@click.argument("recipes", nargs=-1)
@json_option
def command(recipes: tuple[str, ...], as_json: bool) -> int:
    """Show when RECIPES are next looked at (default: those of ./recipes that have a schedule).

    Times are in the schedule's own zone, then in UTC.
    """
    from datetime import UTC, datetime

    from pipeline.commands.tables import table, terminal
    from pipeline.schedule.recipes import scheduled

    found, now = scheduled(recipes), datetime.now(UTC)
    if as_json:
        emit(
            [
                {
                    "recipe": item.name,
                    "schedule": item.expression,
                    "timezone": item.zone,
                    "words": item.words,
                    "missed": item.recipe.refresh.missed,
                    "next": [
                        {"local": time.isoformat(), "utc": time.astimezone(UTC).isoformat()}
                        for time in item.next_times(now, _SHOWN)
                    ],
                }
                for item in found
            ]
        )
        return 0
    if not found:
        click.echo("no recipe of ./recipes has a schedule: refresh: {schedule: 0 3 * * 6, timezone: Europe/Berlin}")
        return 0
    rows = table("recipe", "next", "UTC", "missed times", "schedule")
    for item in found:
        times = item.next_times(now, _SHOWN)
        rows.add_row(
            item.name,
            "\n".join(time.strftime("%a %Y-%m-%d %H:%M %Z") for time in times) or "never",
            "\n".join(time.astimezone(UTC).strftime("%a %Y-%m-%d %H:%M") for time in times) or "never",
            _MISSED[item.recipe.refresh.missed],
            f"{item.words}\n{item.expression}",
        )
    terminal().print(rows)
    return 0
