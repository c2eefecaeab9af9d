"""A schedule as a systemd timer with its service.

    >>> on_calendar("0 3 1 * 6", "Europe/Berlin")
    ('*-*-01 03:00:00 Europe/Berlin', 'Sat *-*-* 03:00:00 Europe/Berlin')

Times are systemd's own (systemd.time(7)), in the schedule's zone. A service runs once at a time, so nothing overlaps;
SIGTERM goes to quantmint alone, which ends what it started. GPUs need their devices, writable and executable memory
for compiled kernels, and the groups of the user, a cluster of Ray the /tmp that its processes meet in: what takes one
of these away is not among the hardening.
"""

from __future__ import annotations

import re

from pipeline.schedule.cron import parsed
from pipeline.schedule.exported import PREFIX, Export, comment, refusal, refuse_clock_changes, user_of
from pipeline.schedule.expression import DAYS, WEEK, DayRule, InexpressibleError, as_list, day_rules
from pipeline.schedule.recipes import Scheduled

STOP_S = 120
"""Seconds between SIGTERM and SIGKILL."""
_NAMES = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_NO_STEPS = 99
_PLAIN = re.compile(r"[A-Za-z0-9_@%$+=:,./-]+")
_HARDENING = ("NoNewPrivileges=yes", "LockPersonality=yes", "RestrictRealtime=yes", "RestrictSUIDSGID=yes")
# A user's own manager may not make these.
_HARDENING_OF_SYSTEM = (
    "ProtectSystem=full",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
)


def on_calendar(expression: str, zone: str) -> tuple[str, ...]:
    """The values of ``OnCalendar=``; together they give the expression's times. InexpressibleError where none can."""
    sim = parsed(expression)
    months = "*" if len(sim.months) == 12 else _set(sim.months)
    hours = "*" if len(sim.hours) == 24 else _set(sim.hours)
    minutes = "*" if len(sim.minutes) == 60 else _set(sim.minutes, 59)
    return tuple(f"{_days(rule, months)} {hours}:{minutes}:00 {zone}" for rule in day_rules(expression))


def units(item: Scheduled, export: Export, *, system: bool = False, run_as: str | None = None) -> dict[str, str]:
    """The texts of ``quantmint-NAME.service`` and ``.timer``, for a user's manager or, with ``system``, the machine's.

    UserError for what systemd cannot say or does otherwise.
    """
    refuse_clock_changes(item, export, "systemd")
    service, timer = f"{PREFIX}{item.name}.service", f"{PREFIX}{item.name}.timer"
    return {
        service: comment(*export.header(item, service)) + _service(item, export, user_of(system, run_as)),
        timer: comment(*export.header(item, timer)) + _timer(item),
    }


def _service(item: Scheduled, export: Export, user: str | None) -> str:
    online = ["Wants=network-online.target", "After=network-online.target"]
    environment = " ".join(_word(f"{name}={value}", command=False) for name, value in export.variables.items())
    return _text(
        "[Unit]",
        f"Description=quantmint: {item.name}, if it is due",
        *([] if user is None else online),
        "",
        "[Service]",
        "Type=oneshot",
        *([] if user is None else [f"User={user}"]),
        *([] if export.directory is None else [f"WorkingDirectory={_path(export.directory)}"]),
        *([f"Environment={environment}"] if environment else []),
        *([] if export.environment_file is None else [f"EnvironmentFile={_path(export.environment_file)}"]),
        f"ExecStart={' '.join(_word(word) for word in export.command(item))}",
        "# Only quantmint is told to end; it ends its own, and goes on from there next time.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "SuccessExitStatus=143",
        *_HARDENING,
        *(() if user is None else _HARDENING_OF_SYSTEM),
    )


def _timer(item: Scheduled) -> str:
    try:
        lines = on_calendar(item.expression, item.zone)
    except InexpressibleError as error:
        raise refusal(
            item, f"systemd cannot say {error}", "Write two recipes, or use `quantmint schedule run`."
        ) from None
    if not lines:
        raise refusal(item, "there is no such day", "Choose another day.")
    return _text(
        "[Unit]",
        f"Description=quantmint: {item.name}, {item.words}".replace("%", "%%"),
        "",
        "[Timer]",
        *(f"OnCalendar={line}" for line in lines),
        f"Persistent={'yes' if item.recipe.refresh.missed == 'run' else 'no'}",
        "",
        "[Install]",
        "WantedBy=timers.target",
    )


def _days(rule: DayRule, months: str) -> str:
    weekdays = "" if rule.weekdays == WEEK else f"{_weekdays(rule.weekdays)} "
    if rule.from_end:
        # A range from the month's end counts down, in words of its own; a list means the same.
        return f"{weekdays}*-{months}~{','.join(f'{day:02}' for day in sorted(rule.days))}"
    return f"{weekdays}*-{months}-{'*' if rule.days == DAYS else _set(rule.days)}"


def _set(numbers: frozenset[int] | set[int], highest: int = _NO_STEPS) -> str:
    """Only minutes have steps: with summer time, systemd 252 loses its way on ``*-01/5-05`` and ``00/9:30``."""
    return as_list(numbers, highest, width=2, to="..", every="")


def _weekdays(days: frozenset[int]) -> str:
    """Names, from Monday on, which is where systemd's week begins."""
    numbers = as_list({(day - 1) % 7 for day in days}, _NO_STEPS, to="..")
    return re.sub(r"\d", lambda digit: _NAMES[int(digit[0])], numbers)


def _word(word: str, *, command: bool = True) -> str:
    """A word of ExecStart= or Environment=: ``%`` begins specifiers in both, ``$`` variables in a command only."""
    text = word.replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(char if char not in '"\\;' else f"\\x{ord(char):02x}" for char in text) + '"'


def _path(path: str) -> str:
    """A path that stands alone, which takes no quotes."""
    return path.replace("%", "%%")


def _text(*lines: str) -> str:
    return "\n".join(lines) + "\n"
