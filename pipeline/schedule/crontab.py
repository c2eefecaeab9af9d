"""Schedules as a crontab of Debian's cron, which has no time zones but the machine's.

An entry in another zone is written at the machine's times where both are always equally far apart, and refused where
they are not: a test of the hour in the command would run in the wrong minute of some days. No `flock`: a second run of
a recipe meets quantmint's own lock, which holds across machines as well, and says so instead of waiting
(``--no-wait``), so that entries which come faster than they are done do not pile up.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from zoneinfo import available_timezones

from pipeline.errors import UserError
from pipeline.schedule.cron import constant_offset
from pipeline.schedule.exported import Export, comment, refusal, refuse_missed, user_of
from pipeline.schedule.expression import InexpressibleError, classic, shifted
from pipeline.schedule.recipes import Scheduled

MAX_COMMAND = 998
"""Characters that Debian's cron reads of a command (MAX_COMMAND of its cron.h, with the end of the line)."""


def crontab(
    items: Sequence[Scheduled], export: Export, *, machine_zone: str, system: bool = False, run_as: str | None = None
) -> dict[str, str]:
    """One file for all: ``quantmint.crontab`` for `crontab FILE`, or with ``system`` ``quantmint`` for /etc/cron.d.

    UserError for what cron cannot say: `missed: run`, another zone whose distance changes, a command that is too long.
    """
    user = user_of(system, run_as)
    # cron.d leaves out files whose names have a dot.
    name = "quantmint" if system else "quantmint.crontab"
    head = (
        f"{name}: times are those of {machine_zone}, this machine's time zone when it was made",
        export.made(*items),
    )
    who = "" if user is None else f"{user} "
    text = comment(*head) + "SHELL=/bin/sh\n"
    for item in items:
        times, command = _times(item, export, machine_zone), _command(item, export)
        text += "\n" + comment(f"{item.name}: {item.words}") + "".join(f"{time} {who}{command}\n" for time in times)
    return {name: text}


def zone_of_machine() -> str:
    """This machine's time zone by its IANA name, which its cron goes by; UserError where the machine does not say."""
    local, named = Path("/etc/localtime"), Path("/etc/timezone")
    name = str(local.readlink()).partition("zoneinfo/")[2] if local.is_symlink() else ""
    if not name and named.is_file():
        name = named.read_text(encoding="utf-8").strip()
    if name not in available_timezones():
        raise UserError("found no name of this machine's time zone", hint="Name it: --machine-timezone Europe/Berlin")
    return name


def _times(item: Scheduled, export: Export, machine_zone: str) -> tuple[str, ...]:
    refuse_missed(item, export, "cron does not run later what it missed while the machine was off")
    try:
        if item.zone == machine_zone:
            return (classic(item.expression),)
        there, here = (constant_offset(zone, export.now) for zone in (item.zone, machine_zone))
        if there is None or here is None:
            raise refusal(
                item,
                f"cron only knows this machine's time zone, {machine_zone}, and the two are not always as far apart",
                f"Write the schedule in {machine_zone}, or use --systemd or --kubernetes, which know zones.",
            )
        return shifted(item.expression, here - there)
    except InexpressibleError as error:
        raise refusal(item, f"cron cannot say {error}", "Use --systemd, or `quantmint schedule run`.") from None


def _command(item: Scheduled, export: Export) -> str:
    """One line for /bin/sh, quoted word by word; then cron's own reading: an unescaped ``%`` would end it."""
    words = export.command(item, "--no-wait")
    if export.variables:
        words = ("env", *(f"{name}={value}" for name, value in export.variables.items()), *words)
    parts = [f"exec {shlex.join(words)}"]
    if export.environment_file is not None:
        # A name without a slash would be sought along PATH.
        parts.insert(0, f"set -a && . {shlex.quote(export.environment_file)} && set +a")
    if export.directory is not None:
        parts.insert(0, f"cd {shlex.quote(export.directory)}")
    line = " && ".join(parts).replace("%", "\\%")
    if len(line) > MAX_COMMAND:
        raise refusal(
            item, f"cron reads {MAX_COMMAND} characters of a command, found {len(line)}", "Shorten its paths."
        )
    return line
