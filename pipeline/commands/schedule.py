"""quantmint schedule SUBCOMMAND"""

from __future__ import annotations

import importlib

import click

# subcommand: (module below pipeline.commands, one line for --help)
_COMMANDS = {
    "list": ("schedule_list", "Show which recipes have a schedule, and when they are next looked at."),
    "export": ("schedule_export", "Write units or manifests for systemd, cron, Kubernetes or GitHub Actions."),
    "run": ("schedule_run", "Stay, and look at recipes at their times, where nothing else does."),
}


class _Lazy(click.Group):
    """A group whose commands are modules that are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"pipeline.commands.{_COMMANDS[cmd_name][0]}").command
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(name="schedule", cls=_Lazy)
def command() -> None:
    """Look at recipes again when their `refresh:` section says so: by what this machine or cluster has, or by us."""
