"""Commands that are imported when they are called, so that ``--help`` answers at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """A group whose commands lie in modules.

    ``table`` maps a command to the module below `pipeline.commands` that has it, to its heading in the help, which may
    be left out, and to its line there.
    """

    table: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, by the name that it gives itself; None for a name that is none."""
        if cmd_name not in self.table:
            return None
        module = importlib.import_module(f"pipeline.commands.{self.table[cmd_name][0]}")
        found = [value for value in vars(module).values() if isinstance(value, click.Command)]
        return next(command for command in found if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them below their headings, without importing any."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, (_, *heading, line) in self.table.items():
            headings.setdefault("".join(heading) or "Commands", []).append((name, line))
        widest = max(map(len, self.table))
        for title, rows in headings.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{widest}}", line) for name, line in rows])
