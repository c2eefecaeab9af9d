"""What every exported schedule has: the command that it runs, where, with what, and which differences are accepted."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from pipeline.errors import UserError
from pipeline.schedule.cron import doubled, follows_clock, skipped
from pipeline.schedule.recipes import Scheduled

Difference = Literal["missed", "clock-change"]
ACCEPT = {
    "missed": "times at which nothing ran are left out, also where a recipe says `missed: run`",
    "clock-change": "in the night of a clock change it does what its scheduler does, not what cron would",
}
PREFIX = "quantmint-"
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Export:
    """How the command is run. ``program`` is what starts quantmint, word by word; ``variables`` are nothing secret.

    ``made_by`` is the command line that makes a recipe's files again, without the recipe, ``now`` the moment from which
    on clock changes are looked at.
    """

    program: tuple[str, ...]
    made_by: str
    now: datetime
    directory: str | None = None
    store: str | None = None
    on: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    environment_file: str | None = None
    accepted: frozenset[str] = frozenset()

    def command(self, item: Scheduled, *more: str) -> tuple[str, ...]:
        """The whole command, word by word."""
        store = () if self.store is None else ("--store", self.store)
        on = () if self.on is None else ("--on", self.on)
        return (*self.program, "requantize", item.given, "--due", *store, *on, *more)

    def made(self, *items: Scheduled) -> str:
        """The line of a comment that says how a file is made again."""
        return f"made by `{self.made_by} {shlex.join(item.given for item in items)}`; make it again rather than edit it"

    def header(self, item: Scheduled, file: str) -> tuple[str, ...]:
        """The lines of a comment that say what the file is and how it is made again."""
        return (
            f"{file}: {item.name} is looked at again. {item.words}.",
            self.made(item),
        )


def user_of(system: bool, run_as: str | None) -> str | None:
    """Whose process it is: who is named for the machine's own scheduler, None for one of the user's."""
    if system != (run_as is not None):
        found = "--system alone" if system else "--run-as alone"
        raise UserError(f"found {found}, expected both or none of --system and --run-as")
    if run_as is not None and not _USER.fullmatch(run_as):
        raise UserError(f"--run-as: found {run_as!r}, expected the name of a user")
    return run_as


def comment(*lines: str) -> str:
    """Lines that begin with ``#``."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def refuse_missed(item: Scheduled, export: Export, why: str) -> None:
    """UserError for `missed: run` in a scheduler that forgets the times at which it did not run."""
    if item.recipe.refresh.missed == "run" and "missed" not in export.accepted:
        raise refusal(
            item,
            f"refresh.missed: run cannot be kept: {why}",
            "Accept that with --accept missed, say `missed: skip`, or use --systemd or --kubernetes, which keep it.",
        )


def refuse_clock_changes(
    item: Scheduled, export: Export, scheduler: Literal["systemd", "Kubernetes", "GitHub"]
) -> None:
    """UserError where a clock change of the next five years meets the schedule, and is not met as cron meets it.

    systemd and Kubernetes do not run what names its hours in a gap, which cron and GitHub run at its end. Kubernetes
    runs twice what names its hours and occurs twice, systemd once what follows the clock and occurs twice; GitHub does
    not say.
    """
    if "clock-change" in export.accepted:
        return
    floating, what, at = follows_clock(item.expression), None, None
    if not floating and scheduler != "GitHub" and (at := skipped(item.expression, item.zone, export.now)):
        what = f"{scheduler} leaves out a time that is skipped, and cron runs it when the gap is over"
    elif scheduler == "GitHub" and (at := doubled(item.expression, item.zone, export.now)):
        what = "GitHub does not say how often it runs what occurs twice"
    elif floating and scheduler == "systemd" and (at := doubled(item.expression, item.zone, export.now)):
        what = "systemd runs once what occurs twice, and cron runs it twice"
    elif not floating and scheduler == "Kubernetes" and (at := doubled(item.expression, item.zone, export.now)):
        what = "Kubernetes runs twice what occurs twice, and cron runs it once"
    if what and at:
        raise refusal(
            item,
            f"its times meet the clock change of {at:%Y-%m-%d} in {item.zone}: {what}",
            "Accept that with --accept clock-change, choose another hour, or write the schedule in UTC.",
        )


def refusal(item: Scheduled, what: str, hint: str) -> UserError:
    """A recipe whose schedule the target cannot express."""
    return UserError(f"{item.name} ({item.expression}, {item.zone}): {what}", hint=hint)


def write(files: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Write each file whole, in UTF-8; returns the paths. What is there already is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path, new = folder / name, folder / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)  # noqa: PTH105 - a scheduler may read it at any moment
        written.append(path)
    return tuple(written)
