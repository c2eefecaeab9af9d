"""quantmint schedule list, export: when recipes are looked at again, and by whom."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantmint.pipeline.base.errors import SECRET, UserError
from quantmint.pipeline.commands.cluster_options import (
    dashboard_address,
    jobs_option,
    parse_variables,
    pod_of,
    pod_options,
    refuse_foreign,
)
from quantmint.pipeline.commands.options import FOLDER, emit, json_option
from quantmint.pipeline.upkeep.schedule.export import (
    EXAMPLE,
    Export,
    Scheduled,
    cron_job,
    needed_secrets,
    scheduled,
    workflow,
)

_SHOWN = 3
_HERE = ("systemd", "cron")
# form: what is left to do by hand
_FORMS = {
    "systemd": "copy to ~/.config/systemd/user, then systemctl --user enable --now each timer; docs/scheduling.md",
    "cron": "`crontab FILE` replaces what the user's crontab had",
    "kubernetes": "kubectl apply -f FILE; ./recipes and the store are those of the volume",
    "github_actions": "copy to .github/workflows of the default branch; make the secrets that it names",
}
# option: the forms that it belongs to, where that is not all
_BELONGS = {
    "on": ("systemd", "cron", "kubernetes"),
    "environment_file": _HERE,
    "machine_timezone": ("cron",),
    **dict.fromkeys(("image", "namespace", "claims", "cpus", "memory", "pod_template"), ("kubernetes",)),
    "secrets": ("kubernetes", "github_actions"),
    "runner": ("github_actions",),
}


@click.group(name="schedule")
def command() -> None:
    """Look at recipes again when their `refresh:` section says so, by a scheduler that a machine or a cluster has."""


@command.command(name="list")
@click.argument("recipes", nargs=-1)
@json_option
def list_(recipes: tuple[str, ...], as_json: bool) -> None:
    """Show when RECIPES are next looked at (default: those of ./recipes that have a schedule).

    Times are in the schedule's own zone, then in UTC. In a pipe each time has a line of its own, with tabs between.

    Example: quantmint schedule list
    """
    from datetime import UTC, datetime

    from quantmint.pipeline.commands.tables import table, terminal

    found, now = scheduled(recipes), datetime.now(UTC)
    times = {item.name: item.next_times(now, _SHOWN) for item in found}
    if as_json:
        emit(
            [
                {
                    "recipe": item.name,
                    "schedule": item.expression,
                    "timezone": item.zone,
                    "words": item.words,
                    "next": [
                        {"local": time.isoformat(), "utc": time.astimezone(UTC).isoformat()}
                        for time in times[item.name]
                    ],
                }
                for item in found
            ]
        )
        return
    if not found:
        click.echo(f"no recipe of ./recipes has a schedule: {EXAMPLE}")
        return
    if not sys.stdout.isatty():  # a line for each time, with tabs between, for whatever reads it
        for item in found:
            for time in times[item.name]:
                utc = time.astimezone(UTC)
                fields = (
                    item.name,
                    f"{time:%Y-%m-%d %H:%M %Z}",
                    f"{utc:%Y-%m-%d %H:%M} UTC",
                    item.words,
                    item.expression,
                )
                click.echo("\t".join(fields))
        return
    rows = [
        (
            item.name,
            "\n".join(time.strftime("%a %Y-%m-%d %H:%M %Z") for time in times[item.name]) or "never",
            "\n".join(time.astimezone(UTC).strftime("%a %Y-%m-%d %H:%M") for time in times[item.name]) or "never",
            f"{item.words}\n{item.expression}",
        )
        for item in found
    ]
    terminal().print(table("recipe", "next", "UTC", "schedule", rows=rows))


@command.command()
@click.argument("recipes", nargs=-1)
@click.option("--systemd", is_flag=True, help="A timer and a service for each recipe.")
@click.option("--cron", is_flag=True, help="A crontab.")
@click.option("--kubernetes", is_flag=True, help="A CronJob for each recipe.")
@click.option("--github-actions", is_flag=True, help="A workflow for each recipe, for a runner of your own.")
@click.option("--output", type=FOLDER, help="Folder to write to (default: print).")
@click.option("--command", "program", metavar="WORDS", help="What starts quantmint (default: this one; `quantmint`).")
@click.option("--directory", help="Where it starts (default: here; the volume; a checkout of the repository).")
@click.option("--store", help="Folder of finished stages there (default: ./store of that directory).")
@jobs_option
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="A variable that is no secret.")
@click.option("--environment-file", metavar="PATH", help="File with NAME=VALUE lines there, such as tokens.")
@click.option(
    "--machine-timezone", metavar="ZONE", help="Time zone of the machine with the cron (default: this one's)."
)
@pod_options
@click.option("--cpus", type=click.IntRange(min=1), help="CPU cores that are kept free for a pod.")
@click.option("--memory", type=click.IntRange(min=1), metavar="GB", help="Host memory that is kept free for a pod.")
@click.option("--runner", metavar="LABEL,LABEL", help="Labels of the runner: self-hosted,mi300x.")
@click.pass_context
def export(ctx: click.Context, /, recipes: tuple[str, ...], output: Path | None, **given: Any) -> None:
    """Print or write what makes a scheduler run `quantmint requantize RECIPE --due`.

    RECIPES: default are those of ./recipes that have a schedule. What the scheduler cannot say of a schedule is
    refused with the reason; docs/scheduling.md compares them.

    Example: quantmint schedule export --systemd --output units
    """
    forms = [form for form in _FORMS if given[form]]
    if len(forms) != 1:
        options = [f"--{form.replace('_', '-')}" for form in (*forms, *_FORMS)]
        found = " and ".join(options[: len(forms)]) or "none"
        raise click.UsageError(f"found {found}, expected one of {', '.join(options[len(forms) :])}")
    (form,) = forms
    refuse_foreign(ctx, form, _BELONGS)
    # A path of this machine holds from everywhere on it.
    paths = {name for name in recipes if form in _HERE and (name.endswith((".yaml", ".yml")) or "/" in name)}
    items = scheduled([str(Path(name).absolute()) if name in paths else name for name in recipes])
    if not items:
        raise UserError("no recipe of ./recipes has a schedule", hint=f"Give one to a recipe: {EXAMPLE}")
    files = _files(form, items, _export(ctx, form, given), given)
    if output is None:
        joint = "\n" if form in _HERE else "---\n"
        click.echo(joint.join(files.values()), nl=False)
    else:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text, encoding="utf-8")
            click.echo(output / name)
    click.echo(f"note: {_FORMS[form]}", err=True)
    wanted = sorted({name for item in items for name in needed_secrets(item.recipe)})
    if form in _HERE and wanted and given["environment_file"] is None:
        click.echo(f"note: {' and '.join(wanted)} come from --environment-file PATH", err=True)


def _export(ctx: click.Context, form: str, given: Mapping[str, Any]) -> Export:
    from quantmint.pipeline.clusters.submit.job import quantmint_program

    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            raise UserError(f"{flags[name]}: found a line break or control character, expected plain text")
    variables = parse_variables("--env", given["variables"])
    for name in variables:
        if not name.isidentifier() or not name.isascii():
            raise UserError(f"--env: found {name!r}, expected NAME=VALUE")
        if SECRET.search(name):
            instead = "--environment-file PATH" if form in _HERE else "--secret"
            raise UserError(
                f"--env: found {name}, which reads like a secret's name: others could read its value", hint=instead
            )
    for name in ("directory", "store", "environment_file"):
        if form in _HERE and given[name] and not Path(given[name]).is_absolute():
            raise UserError(f"{flags[name]}: found {given[name]!r}, expected an absolute path")
    dashboard_address(given["on"])  # a fault is told now, not at night
    if form == "kubernetes" and given["on"] == "ray" and "RAY_ADDRESS" not in variables:
        raise UserError("--on: found ray, and a pod is no node of a Ray cluster", hint="--on http://HEAD:8265")
    here = quantmint_program() if form in _HERE else ("quantmint",)
    return Export(
        program=tuple(shlex.split(given["program"])) if given["program"] else here,
        made_by=f"quantmint schedule export --{form.replace('_', '-')}",
        directory=given["directory"] or (str(Path.cwd()) if form in _HERE else None),
        store=given["store"],
        on=given["on"],
        variables=variables,
        environment_file=given["environment_file"],
    )


def _files(form: str, items: Sequence[Scheduled], how: Export, given: Mapping[str, Any]) -> dict[str, str]:
    from quantmint.pipeline.upkeep.schedule.export import crontab, units, zone_of_machine

    if form == "cron":
        zone = given["machine_timezone"] or zone_of_machine()
        return crontab(items, how, machine_zone=zone)
    if form == "systemd":
        made = [units(item, how) for item in items]
    elif form == "kubernetes":
        if given["image"] is None:
            raise UserError("found no image", hint="Name one that has quantmint and vLLM: --image NAME@sha256:...")
        pod = pod_of(given, cpus=given["cpus"], memory_gb=given["memory"])
        made = [cron_job(item, how, pod, given["namespace"]) for item in items]
    else:
        runner = [label.strip() for label in (given["runner"] or "").split(",") if label.strip()]
        made = [workflow(item, how, runner=runner, secrets=given["secrets"]) for item in items]
    return {name: text for files in made for name, text in files.items()}
