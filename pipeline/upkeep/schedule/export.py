"""Schedules as CronJobs of Kubernetes, workflows of GitHub Actions, timers of systemd and crontabs of Debian's cron.

    >>> on_calendar("0 3 1 * 6", "Europe/Berlin")
    ('*-*-01 03:00:00 Europe/Berlin', 'Sat *-*-* 03:00:00 Europe/Berlin')

Each is a template of this folder. What a scheduler cannot express is refused. One that leaves out a time, or comes
twice, does no harm: a look that finds nothing due changes nothing, and the next look makes up for a lost one. So clock
changes are left to each scheduler's own rules. Secrets are named; their values are the cluster's or GitHub's to keep.
No `flock`: a second run of a recipe meets quantmint's own lock, which holds across machines as well.
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
from quantmint.pipeline.clusters.submit.job import render
from quantmint.pipeline.clusters.submit.pod import Pod, SecretVariable, has_digest, job_spec, require_persistent
from quantmint.pipeline.recipe.load import find, load_recipe, recipe_names
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.render.kubernetes import object_name
from quantmint.pipeline.serving.render.manifest import dump

EXAMPLE: Final = "refresh: {schedule: 0 3 * * 6, timezone: Europe/Berlin}"
PREFIX: Final = "quantmint-"
UTC_NAMES: Final = ("UTC", "Etc/UTC")
CLUSTER_SECRET: Final = "quantmint"  # noqa: S105 - a name, no secret
"""Of the Secret of a cluster that holds what nobody named another for."""
_POD_RETRIES: Final = 1
"""Of a pod that was killed: `requantize` itself repeats what may succeed in a while."""
_SECRET: Final = re.compile(r"(?!GITHUB_)[A-Za-z_][A-Za-z0-9_]*")
_WEEKDAYS: Final = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%$+=:,./-]+")


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
    items: dict[str, Scheduled] = {}
    for name in given or here():
        recipe = load_recipe(name).recipe
        if recipe.refresh.schedule is not None:
            items[recipe.name] = Scheduled(name, recipe, recipe.refresh.schedule)
        elif given:
            raise UserError(f"{name} has no schedule", hint=f"Give the recipe one: {EXAMPLE}")
    return tuple(items.values())


def here() -> tuple[str, ...]:
    """Return the names of the recipes in ./recipes."""
    return tuple(name for name in recipe_names() if find(name).parent == Path("recipes"))


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

    def command(self, item: Scheduled, *options: str) -> tuple[str, ...]:
        """Return the words of the command that requantizes a recipe if it is due; ``options`` are further ones."""
        store = () if self.store is None else ("--store", self.store)
        on = () if self.on is None else ("--on", self.on)
        return (*self.program, "requantize", item.given, "--due", *store, *on, *options)

    def file(self, name: str, template: str, comments: Sequence[str] = (), **values: Any) -> dict[str, str]:
        """Return the text of a template, by the file's ``name``; its header has that name, our command and comments."""
        title = f"{name}: made by `{self.made_by}`; make it again rather than edit it"
        header = "".join(f"# {line}\n" for line in (title, *comments))
        return {name: render(Path(__file__).with_name(template), header=header, export=self, **values)}


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
    named = {reference.variable for reference in pod.secrets}
    missing = [name for name in needed_secrets(item.recipe) if name not in named]
    pod = replace(
        pod,
        name=item.name,
        command=export.command(item),
        kind=machine.kind,
        gpus=gpus,
        folder=export.directory,
        variables=export.variables,
        secrets=(*pod.secrets, *(SecretVariable(name, CLUSTER_SECRET, name) for name in missing)),
    )
    job = job_spec(pod, retries=_POD_RETRIES)
    if pod.claims:  # else the store is where the image has it
        require_persistent(pod, export.store or "store")
    notes = [] if has_digest(pod.image) else ["the image is named by a tag: that it was moved makes no recipe due"]
    if missing:
        keys = " and ".join(missing)
        notes.append(f"the Secret {CLUSTER_SECRET} must hold {keys}; --secret NAME=SECRET:KEY names another")
    if (folder := item.recipe.source.folder) is not None:
        place = f"source.folder {folder} must lie on the volume of the claim"
        notes.append(f"{place}: a pod does not see this machine's disk")
    return export.file(
        f"{PREFIX}{item.name}.yaml",
        "cronjob.yaml.j2",
        (item.words, *notes),
        item=item,
        object_name=object_name(PREFIX, item.name),
        namespace=namespace,
        labels=pod.labels,
        expression=either_day(item, "Kubernetes"),
        job=dump(job),
    )


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
    sign = item.recipe.publish.sign
    references = {name: f"${{{{ secrets.{name} }}}}" for name in (*needed_secrets(item.recipe), *secrets)}
    return export.file(
        f"{PREFIX}{item.name}.yml",
        "workflow.yml.j2",
        (item.words, "GitHub begins late when it is busy, and only what is on the default branch"),
        item=item,
        expression=either_day(item, "GitHub"),
        zone=None if item.zone in UTC_NAMES else item.zone,
        keyless=sign is not None and sign.keyless,
        runner=list(runner),
        environment={**export.variables, **references},
        command=command,
    )


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
    calendar, unit = on_calendar(item.expression, item.zone), f"{PREFIX}{item.name}"
    service = export.file(f"{unit}.service", "systemd.service.j2", item=item, word=_word)
    return service | export.file(f"{unit}.timer", "systemd.timer.j2", item=item, calendar=calendar)


def crontab(items: Sequence[Scheduled], export: Export, *, machine_zone: str) -> dict[str, str]:
    """Return the text of one file for all recipes, ``quantmint.crontab``, by its name, for `crontab FILE`.

    Raises `UserError` for a schedule in another time zone than the machine's, the only one that cron knows.
    """
    for item in items:
        if item.zone != machine_zone and not {item.zone, machine_zone}.issubset(UTC_NAMES):
            what = f"cron only knows this machine's time zone, {machine_zone}"
            raise refusal(item, what, f"Write the schedule in {machine_zone}, or use --systemd, which knows zones.")
    entries = [(item, classic(item.expression)) for item in items]
    comment = f"times are those of {machine_zone}, this machine's time zone when it was made"
    return export.file("quantmint.crontab", "crontab.j2", [comment], entries=entries)


def zone_of_machine() -> str:
    """Return the IANA name of this machine's time zone. Raises `UserError` if /etc/localtime does not name one."""
    local = Path("/etc/localtime")
    name = str(local.readlink()).partition("zoneinfo/")[2] if local.is_symlink() else ""
    if name not in available_timezones():
        raise UserError("found no name of this machine's time zone", hint="Name it: --machine-timezone Europe/Berlin")
    return name


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
