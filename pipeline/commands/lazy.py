"""Commands that are imported when they are called, so that ``--help`` answers at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """A group whose commands are modules.

    ``table`` maps a command to its module below `pipeline.commands`, which has it as ``command``, and to its line of
    the help.
    """

    table: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for a name that is none."""
        if cmd_name not in self.table:
            return None
        command = importlib.import_module(f"pipeline.commands.{self.table[cmd_name][0]}").command
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])
