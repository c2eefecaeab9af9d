"""A schedule for what this machine has: a systemd timer with its service, or a crontab of Debian's cron.

    >>> on_calendar("0 3 1 * 6", "Europe/Berlin")
    ('*-*-01 03:00:00 Europe/Berlin', 'Sat *-*-* 03:00:00 Europe/Berlin')

systemd's times are in the schedule's zone. What would take GPUs, executable memory for compiled kernels or the /tmp of
Ray away is not among the hardening. cron has no time zones but the machine's. No `flock`: a second run of a recipe
meets quantmint's own lock, which holds across machines as well, and says so instead of waiting (``--no-wait``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final
from zoneinfo import available_timezones

from pipeline.base.errors import UserError
from pipeline.base.times import parsed, ranges, weekdays
from pipeline.upkeep.schedule.export import (
    PREFIX,
    UTC_NAMES,
    Export,
    Scheduled,
    classic_or_refuse,
    refusal,
    refuse_missed,
)

STOP_S: Final = 120
"""Seconds between SIGTERM and SIGKILL."""
_WEEKDAYS: Final = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%$+=:,./-]+")
_USER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_HARDENING: Final = "NoNewPrivileges=yes\nLockPersonality=yes\nRestrictRealtime=yes\nRestrictSUIDSGID=yes\n"
# A user's own manager may not make these.
_HARDENING_OF_SYSTEM: Final = (
    "ProtectSystem=full\nProtectControlGroups=yes\nProtectKernelLogs=yes\nProtectKernelModules=yes\n"
    "ProtectKernelTunables=yes\n"
)


def on_calendar(expression: str, zone: str) -> tuple[str, ...]:
    """The values of ``OnCalendar=`` that together give the times of a classic expression.

    No steps: with summer time systemd 252 loses its way on some of them.
    """
    sim = parsed(expression)
    months, days = _set(sim.months, 12), _set(sim.days, 31)
    of_week = weekdays(sim)
    names = "" if len(of_week) == 7 else ",".join(_WEEKDAYS[day] for day in sorted(of_week)) + " "
    dates = (f"{names}*-{months}-{days}",) if sim.day_and else (f"*-{months}-{days}", f"{names}*-{months}-*")
    return tuple(f"{date} {_set(sim.hours, 24)}:{_set(sim.minutes, 60)}:00 {zone}" for date in dates)


def units(item: Scheduled, export: Export, *, run_as: str | None = None) -> dict[str, str]:
    """The texts of ``quantmint-NAME.service`` and ``.timer``, for a user's manager or, with ``run_as``, the machine's.

    UserError for what systemd cannot say.
    """
    classic_or_refuse(item, "systemd")
    service, timer = f"{PREFIX}{item.name}.service", f"{PREFIX}{item.name}.timer"
    return {
        service: export.header(service) + _service(item, export, _user(run_as)),
        timer: export.header(timer) + _timer(item),
    }


def crontab(
    items: Sequence[Scheduled], export: Export, *, machine_zone: str, run_as: str | None = None
) -> dict[str, str]:
    """One file for all: ``quantmint.crontab`` for `crontab FILE`, or with ``run_as`` ``quantmint`` for /etc/cron.d.

    UserError for what cron cannot say: `missed: run`, and another time zone than the machine's.
    """
    user = _user(run_as)
    # cron.d leaves out files whose names have a dot.
    name = "quantmint.crontab" if user is None else "quantmint"
    text = export.header(name, f"times are those of {machine_zone}, this machine's time zone when it was made")
    text += "SHELL=/bin/sh\n"
    for item in items:
        refuse_missed(item, "cron")
        if item.zone != machine_zone and not {item.zone, machine_zone}.issubset(UTC_NAMES):
            what = f"cron only knows this machine's time zone, {machine_zone}"
            raise refusal(item, what, f"Write the schedule in {machine_zone}, or use --systemd, which knows zones.")
        who = "" if user is None else f"{user} "
        times = classic_or_refuse(item, "cron")
        text += f"\n# {item.name}: {item.words}\n{times} {who}{_cron_command(item, export)}\n"
    return {name: text}


def zone_of_machine() -> str:
    """This machine's time zone by its IANA name, which its cron goes by; UserError where the machine does not say."""
    local = Path("/etc/localtime")
    name = str(local.readlink()).partition("zoneinfo/")[2] if local.is_symlink() else ""
    if name not in available_timezones():
        raise UserError("found no name of this machine's time zone", hint="Name it: --machine-timezone Europe/Berlin")
    return name


def _service(item: Scheduled, export: Export, user: str | None) -> str:
    environment = " ".join(_word(f"{name}={value}", command=False) for name, value in export.variables.items())
    lines = [
        "[Unit]",
        f"Description=quantmint: {item.name}, if it is due",
        *([] if user is None else ["Wants=network-online.target", "After=network-online.target"]),
        "",
        "[Service]",
        "Type=oneshot",
        *([] if user is None else [f"User={user}"]),
        *([] if export.directory is None else ["WorkingDirectory=" + export.directory.replace("%", "%%")]),
        *([f"Environment={environment}"] if environment else []),
        *([] if export.environment_file is None else ["EnvironmentFile=" + export.environment_file.replace("%", "%%")]),
        f"ExecStart={' '.join(_word(word) for word in export.command(item))}",
        "# Only quantmint is told to end; it ends its own, and goes on from there next time.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "SuccessExitStatus=143",
    ]
    return "\n".join(lines) + "\n" + _HARDENING + ("" if user is None else _HARDENING_OF_SYSTEM)


def _timer(item: Scheduled) -> str:
    lines = [
        "[Unit]",
        f"Description=quantmint: {item.name}, {item.words}".replace("%", "%%"),
        "",
        "[Timer]",
        *(f"OnCalendar={line}" for line in on_calendar(item.expression, item.zone)),
        f"Persistent={'no' if item.skips_missed else 'yes'}",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return "\n".join(lines) + "\n"


def _cron_command(item: Scheduled, export: Export) -> str:
    """One line for /bin/sh, quoted word by word; then cron's own reading: an unescaped ``%`` would end it."""
    command = export.command(item, "--no-wait")
    if export.variables:
        command = ("env", *(f"{name}={value}" for name, value in export.variables.items()), *command)
    parts = [f"exec {shlex.join(command)}"]
    if export.environment_file is not None:
        parts.insert(0, f"set -a && . {shlex.quote(export.environment_file)} && set +a")
    if export.directory is not None:
        parts.insert(0, f"cd {shlex.quote(export.directory)}")
    return " && ".join(parts).replace("%", "\\%")


def _user(run_as: str | None) -> str | None:
    if run_as is not None and not _USER.fullmatch(run_as):
        raise UserError(f"--run-as: found {run_as!r}, expected the name of a user")
    return run_as


def _set(numbers: Collection[int], every: int) -> str:
    return "*" if len(numbers) == every else ranges(numbers, to="..", width=2)


def _word(word: str, *, command: bool = True) -> str:
    """A word of ExecStart= or Environment=: ``%`` begins specifiers in both, ``$`` variables in a command only."""
    text = word.replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(char if char not in '"\\;' else f"\\x{ord(char):02x}" for char in text) + '"'
