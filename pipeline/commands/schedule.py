"""quantmint schedule SUBCOMMAND"""

from __future__ import annotations

import click

from pipeline.commands.lazy import LazyGroup

# subcommand: (module below pipeline.commands, one line for --help)
_COMMANDS = {
    "list": ("schedule_list", "Show which recipes have a schedule, and when they are next looked at."),
    "export": ("schedule_export", "Write units or manifests for systemd, cron, Kubernetes or GitHub Actions."),
    "run": ("schedule_run", "Stay, and look at recipes at their times, where nothing else does."),
}


class _Commands(LazyGroup):
    """What can be done with schedules."""

    table = _COMMANDS


@click.group(name="schedule", cls=_Commands)
def command() -> None:
    """Look at recipes again when their `refresh:` section says so: by what this machine or cluster has, or by us."""
