"""Schedules as CronJobs of Kubernetes, workflows of GitHub Actions, timers of systemd and crontabs of Debian's cron.

    >>> on_calendar("0 3 1 * 6", "Europe/Berlin")
    ('*-*-01 03:00:00 Europe/Berlin', 'Sat *-*-* 03:00:00 Europe/Berlin')

What a target cannot say is refused. A scheduler that leaves out a time, or comes twice, does no harm: a look that finds
nothing due changes nothing, and the next makes up for a lost one. So clock changes are left to each scheduler's own
rules. Secrets are named; their values are the cluster's or GitHub's to keep.

systemd's times are in the schedule's zone. What would take GPUs, executable memory for compiled kernels or the /tmp of
Ray away is not among the hardening. cron has no time zones but the machine's. No `flock`: a second run of a recipe
meets quantmint's own lock, which holds across machines as well, and says so instead of waiting (``--no-wait``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import available_timezones

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.times import classic, next_times, parsed, ranges, weekdays, words
from quantmint.pipeline.clusters.submit.pod import Pod, SecretVariable, has_digest, job_spec, require_persistent
from quantmint.pipeline.recipe.load import find, load_recipe, recipe_names
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.render.kubernetes import object_name
from quantmint.pipeline.serving.render.manifest import dump

EXAMPLE: Final = "refresh: {schedule: 0 3 * * 6, timezone: Europe/Berlin}"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A recipe with a schedule; ``given`` is the name or path by which it was named."""

    given: str
    recipe: Recipe
    expression: str

    @property
    def name(self) -> str:
        """Return the recipe's name, which is its file's name too."""
        return self.recipe.name

    @property
    def zone(self) -> str:
        """Return the time zone of the cron expression."""
        return self.recipe.refresh.timezone

    @property
    def words(self) -> str:
        """Return the schedule in words."""
        return words(self.expression, self.zone)

    def next_times(self, after: datetime, n: int) -> tuple[datetime, ...]:
        """Return the next `n` times of the schedule after a moment, in its own time zone."""
        return next_times(self.expression, self.zone, after, n)


def scheduled(given: Sequence[str] = ()) -> tuple[Scheduled, ...]:
    """Return the named recipes, each of which must have a schedule; without names, those of ./recipes with a schedule.

    Raises `UserError` for a name that is unknown or has no schedule, and for an invalid recipe.
    """
    found = []
    for name in given or here():
        item = load_scheduled(name)
        if item is not None:
            found.append(item)
        elif given:
            raise UserError(f"{name} has no schedule", hint=f"Give the recipe one: {EXAMPLE}")
    return tuple({item.name: item for item in found}.values())


def load_scheduled(given: str) -> Scheduled | None:
    """Return a recipe, given by name or path, with its schedule; None if it has none."""
    recipe = load_recipe(given).recipe
    schedule = recipe.refresh.schedule
    return None if schedule is None else Scheduled(given, recipe, schedule)


def here() -> tuple[str, ...]:
    """Return the names of the recipes in ./recipes."""
    return tuple(name for name in recipe_names() if find(name).parent == Path("recipes"))


PREFIX: Final = "quantmint-"
UTC_NAMES: Final = ("UTC", "Etc/UTC")
CHECKOUT: Final = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd"
_CHECKOUT_VERSION: Final = "v6.0.2"
_LONGEST_MINUTES: Final = 5 * 24 * 60
"""What GitHub allows a job on a runner of one's own; a job that says nothing ends after six hours."""
_SECRET: Final = re.compile(r"(?!GITHUB_)[A-Za-z_][A-Za-z0-9_]*")
CLUSTER_SECRET: Final = "quantmint"  # noqa: S105 - a name, no secret
"""Of the Secret of a cluster that holds what nobody named another for."""
_POD_RETRIES: Final = 1
"""Of a pod that was killed: `requantize` itself repeats what may succeed in a while."""


@dataclass(frozen=True, slots=True)
class Export:
    """The parts of the exported command. ``program`` are its first words, ``variables`` are no secrets.

    ``made_by`` is the command that makes the exported file, for its header. ``directory`` is where it starts.
    """

    program: tuple[str, ...]
    made_by: str
    directory: str | None = None
    store: str | None = None
    on: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    environment_file: str | None = None

    def command(self, item: Scheduled, *more: str) -> tuple[str, ...]:
        """Return the words of the command that requantizes a recipe if it is due; ``more`` are further options."""
        store = () if self.store is None else ("--store", self.store)
        on = () if self.on is None else ("--on", self.on)
        return (*self.program, "requantize", item.given, "--due", *store, *on, *more)

    def header(self, file: str, *lines: str) -> str:
        """Return a comment with the file's name, the command that made it, and further ``lines``."""
        made = f"{file}: made by `{self.made_by}`; make it again rather than edit it"
        return "".join(f"# {line}\n" for line in (made, *lines))


def either_day(item: Scheduled, scheduler: str) -> str:
    """Return the cron expression for a scheduler that runs if either the day of month or the day of week matches.

    Raises `UserError` for a schedule that requires both; ``scheduler`` is the name in its message.
    """
    sim = parsed(item.expression)
    if sim.day_and and len(sim.days) < 31 and len(weekdays(sim)) < 7:
        what = f"day of month and day of week both must hold, and one is enough for {scheduler}"
        raise refusal(item, what, "Use --systemd.")
    return classic(item.expression)


def refusal(item: Scheduled, what: str, hint: str) -> UserError:
    """Return the error for a recipe whose schedule the target cannot express; ``what`` is the reason."""
    return UserError(f"{item.name} ({item.expression}, {item.zone}): {what}", hint=hint)


def needed_secrets(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the variables with secrets that a recipe's run needs."""
    hub = recipe.source.repo is not None or recipe.publish.hub is not None
    signs = recipe.publish.sign is not None and recipe.publish.sign.key is not None
    return (*(["HF_TOKEN"] if hub else []), *(["QUANTMINT_SIGNING_PASSPHRASE"] if signs else []))


def cron_job(item: Scheduled, export: Export, pod: Pod, namespace: str | None = None) -> dict[str, str]:
    """Return the text of a CronJob (batch/v1) that runs ``pod``, by its file name ``quantmint-NAME.yaml``.

    A pod starts in the folder of its volume, where the store, the published releases and ./recipes lie. Jobs do not
    overlap. Since Kubernetes 1.27, which `timeZone` needs, the newest missed time is begun however many were missed.
    Raises `UserError` for what a CronJob cannot express.
    """
    target = item.recipe.target
    machine = hardware(target.hardware)
    gpus = 0 if machine.kind == "cpu" or export.on is not None else target.gpus  # jobs of a Ray cluster hold their own
    if gpus > machine.gpus_per_node:
        hint = "Run it on a Ray cluster: --on http://HEAD:8265"
        raise refusal(item, f"a pod has the GPUs of one node, and {gpus} are of several", hint)
    pod = replace(pod, name=item.name, command=export.command(item), kind=machine.kind, gpus=gpus)
    pod = replace(pod, folder=export.directory, variables=export.variables)
    named = {reference.variable for reference in pod.secrets}
    missing = tuple(
        SecretVariable(name, CLUSTER_SECRET, name) for name in needed_secrets(item.recipe) if name not in named
    )
    pod = replace(pod, secrets=(*pod.secrets, *missing))
    job = job_spec(pod, retries=_POD_RETRIES)
    if pod.claims:  # else the store is where the image has it
        require_persistent(pod, export.store or "store")
    within = {"namespace": namespace} if namespace else {}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": object_name(PREFIX, item.name), **within, "labels": pod.labels},
        "spec": {
            "schedule": either_day(item, "Kubernetes"),
            "timeZone": item.zone,
            "concurrencyPolicy": "Forbid",
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {"metadata": {"labels": pod.labels}, "spec": job},
        },
    }
    file = f"{PREFIX}{item.name}.yaml"
    notes = [] if has_digest(pod.image) else ["the image is named by a tag: that it was moved makes no recipe due"]
    if missing:
        keys = " and ".join(reference.key for reference in missing)
        notes.append(f"the Secret {CLUSTER_SECRET} must hold {keys}; --secret NAME=SECRET:KEY names another")
    if item.recipe.source.folder is not None:
        notes.append(
            f"source.folder {item.recipe.source.folder} must lie on the volume of the claim: a pod does not see this "
            "machine's disk"
        )
    return {file: export.header(file, item.words, *notes) + dump(manifest)}


def workflow(item: Scheduled, export: Export, *, runner: Sequence[str], secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return the text of a workflow for .github/workflows, by its file name ``quantmint-NAME.yml``.

    Its token may only read, and sign if the recipe signs without a key. ``runner`` are the runner's labels, ``secrets``
    names of repository secrets that the command gets besides those which the recipe needs. Raises `UserError` for what
    GitHub cannot express.
    """
    if not runner:
        raise UserError("found no labels of a runner", hint="Name them: --runner self-hosted,mi300x")
    for name in secrets:
        if not _SECRET.fullmatch(name):
            raise UserError(f"--secret: found {name!r}, expected the name of a secret: letters, digits and _")
    command = shlex.join(export.command(item))
    if any("${{" in text for text in (command, export.directory or "", *export.variables.values())):
        raise UserError("found ${{ in what would run, which GitHub would replace", hint="Rename what holds it.")
    time = {"cron": either_day(item, "GitHub")}
    if item.zone not in UTC_NAMES:
        time["timezone"] = item.zone
    wanted = dict.fromkeys((*needed_secrets(item.recipe), *secrets))
    sign = item.recipe.publish.sign
    environment = {**export.variables, **{name: f"${{{{ secrets.{name} }}}}" for name in wanted}}
    step: dict[str, Any] = {"name": f"Make {item.name} again if it is due"}
    if export.directory is not None:
        step["working-directory"] = export.directory
    if environment:
        step["env"] = environment
    # Store and published folders in the workspace stay, and no token of the repository is left there.
    checkout = {"uses": CHECKOUT, "with": {"persist-credentials": False, "clean": False}}
    document = {
        "name": f"quantmint: {item.name}",
        "on": {"schedule": [time], "workflow_dispatch": {}},
        "permissions": {"contents": "read", **({"id-token": "write"} if sign is not None and sign.keyless else {})},
        "concurrency": {"group": f"{PREFIX}{item.name}", "cancel-in-progress": False},
        "jobs": {
            "requantize": {
                "runs-on": list(runner),
                "timeout-minutes": _LONGEST_MINUTES,
                "steps": [*([checkout] if export.directory is None else []), {**step, "run": command}],
            }
        },
    }
    file = f"{PREFIX}{item.name}.yml"
    head = export.header(file, item.words, "GitHub begins late when it is busy, and only what is on the default branch")
    return {file: head + dump(document).replace(CHECKOUT, f"{CHECKOUT}  # {_CHECKOUT_VERSION}")}


# What this machine has: a systemd timer with its service, or a crontab of Debian's cron.

STOP_S: Final = 120
"""Seconds between SIGTERM and SIGKILL."""
_WEEKDAYS: Final = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%$+=:,./-]+")
_HARDENING: Final = "NoNewPrivileges=yes\nLockPersonality=yes\nRestrictRealtime=yes\nRestrictSUIDSGID=yes\n"


def on_calendar(expression: str, zone: str) -> tuple[str, ...]:
    """Return the values of ``OnCalendar=`` that together give the times of a cron expression.

    They have no steps: with summer time systemd 252 miscalculates some of them.
    """
    sim = parsed(expression)
    months, days = _set(sim.months, 12), _set(sim.days, 31)
    of_week = weekdays(sim)
    names = "" if len(of_week) == 7 else ",".join(_WEEKDAYS[day] for day in sorted(of_week)) + " "
    dates = (f"{names}*-{months}-{days}",) if sim.day_and else (f"*-{months}-{days}", f"{names}*-{months}-*")
    return tuple(f"{date} {_set(sim.hours, 24)}:{_set(sim.minutes, 60)}:00 {zone}" for date in dates)


def units(item: Scheduled, export: Export) -> dict[str, str]:
    """Return the texts of ``quantmint-NAME.service`` and ``.timer`` for systemd's user manager, by file name."""
    service, timer = f"{PREFIX}{item.name}.service", f"{PREFIX}{item.name}.timer"
    return {
        service: export.header(service) + _service(item, export),
        timer: export.header(timer) + _timer(item),
    }


def crontab(items: Sequence[Scheduled], export: Export, *, machine_zone: str) -> dict[str, str]:
    """Return the text of one file for all recipes, ``quantmint.crontab``, by its name, for `crontab FILE`.

    Raises `UserError` for a schedule in another time zone than the machine's, the only one that cron knows.
    """
    name = "quantmint.crontab"
    text = export.header(name, f"times are those of {machine_zone}, this machine's time zone when it was made")
    text += "SHELL=/bin/sh\n"
    for item in items:
        if item.zone != machine_zone and not {item.zone, machine_zone}.issubset(UTC_NAMES):
            what = f"cron only knows this machine's time zone, {machine_zone}"
            raise refusal(item, what, f"Write the schedule in {machine_zone}, or use --systemd, which knows zones.")
        text += f"\n# {item.name}: {item.words}\n{classic(item.expression)} {_cron_command(item, export)}\n"
    return {name: text}


def zone_of_machine() -> str:
    """Return the IANA name of this machine's time zone. Raises `UserError` if /etc/localtime does not name one."""
    local = Path("/etc/localtime")
    name = str(local.readlink()).partition("zoneinfo/")[2] if local.is_symlink() else ""
    if name not in available_timezones():
        raise UserError("found no name of this machine's time zone", hint="Name it: --machine-timezone Europe/Berlin")
    return name


def _service(item: Scheduled, export: Export) -> str:
    environment = " ".join(_word(f"{name}={value}", command=False) for name, value in export.variables.items())
    lines = [
        "[Unit]",
        f"Description=quantmint: {item.name}, if it is due",
        "",
        "[Service]",
        "Type=oneshot",
        *([] if export.directory is None else ["WorkingDirectory=" + export.directory.replace("%", "%%")]),
        *([f"Environment={environment}"] if environment else []),
        *([] if export.environment_file is None else ["EnvironmentFile=" + export.environment_file.replace("%", "%%")]),
        f"ExecStart={' '.join(_word(word) for word in export.command(item))}",
        "# Only quantmint is told to end; it ends its own, and goes on from there next time.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "SuccessExitStatus=143",
    ]
    return "\n".join(lines) + "\n" + _HARDENING


def _timer(item: Scheduled) -> str:
    lines = [
        "[Unit]",
        f"Description=quantmint: {item.name}, {item.words}".replace("%", "%%"),
        "",
        "[Timer]",
        *(f"OnCalendar={line}" for line in on_calendar(item.expression, item.zone)),
        "Persistent=yes",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return "\n".join(lines) + "\n"


def _cron_command(item: Scheduled, export: Export) -> str:
    """Return the command as one shell line for a crontab, with each ``%``, which would end the line, escaped."""
    command = export.command(item, "--no-wait")
    if export.variables:
        command = ("env", *(f"{name}={value}" for name, value in export.variables.items()), *command)
    parts = [f"exec {shlex.join(command)}"]
    if export.environment_file is not None:
        parts.insert(0, f"set -a && . {shlex.quote(export.environment_file)} && set +a")
    if export.directory is not None:
        parts.insert(0, f"cd {shlex.quote(export.directory)}")
    return " && ".join(parts).replace("%", "\\%")


def _set(numbers: Collection[int], every: int) -> str:
    return "*" if len(numbers) == every else ranges(numbers, to="..", width=2)


def _word(word: str, *, command: bool = True) -> str:
    """Return a word quoted for systemd: for ExecStart=, or without ``command`` for Environment=.

    ``%`` begins specifiers in both, ``$`` variables in a command only.
    """
    text = word.replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(char if char not in '"\\;' else f"\\x{ord(char):02x}" for char in text) + '"'
