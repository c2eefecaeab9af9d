"""quantmint schedule export --systemd | --cron | --kubernetes | --github-actions [RECIPES]"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeline.commands.options import jobs_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.schedule.exported import Export
    from pipeline.schedule.recipes import Scheduled

_FORMS = ("systemd", "cron", "kubernetes", "github_actions")
# option: the forms that it belongs to, where that is not all
_BELONGS = {
    "on": ("systemd", "cron", "kubernetes"),
    "environment_file": ("systemd", "cron"),
    "system": ("systemd", "cron"),
    "run_as": ("systemd", "cron"),
    "machine_timezone": ("cron",),
    "image": ("kubernetes",),
    "namespace": ("kubernetes",),
    "claims": ("kubernetes",),
    "node_selector": ("kubernetes",),
    "cpus": ("kubernetes",),
    "memory": ("kubernetes",),
    "pod_template": ("kubernetes",),
    "secrets": ("kubernetes", "github_actions"),
    "runner": ("github_actions",),
}
_HERE = ("systemd", "cron")


@click.command(name="export")
@click.argument("recipes", nargs=-1)
@click.option("--systemd", is_flag=True, help="A timer and a service for each recipe.")
@click.option("--cron", is_flag=True, help="A crontab.")
@click.option("--kubernetes", is_flag=True, help="A CronJob for each recipe.")
@click.option("--github-actions", is_flag=True, help="A workflow for each recipe, for a runner of your own.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to (default: print).")
@click.option("--accept", multiple=True, type=click.Choice(["missed", "clock-change"]), help="A difference to accept.")
@click.option("--command", "program", metavar="WORDS", help="What starts quantmint (default: this one; `quantmint`).")
@click.option("--directory", help="Where it starts (default: here; the volume; a checkout of the repository).")
@click.option("--store", help="Folder of finished stages there (default: ./store of that directory).")
@jobs_option
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="A variable that is no secret.")
@click.option("--environment-file", metavar="PATH", help="File with NAME=VALUE lines there, such as tokens.")
@click.option("--system", is_flag=True, help="For the machine (/etc/systemd/system, /etc/cron.d), not for one user.")
@click.option("--run-as", metavar="USER", help="Whose process it is, with --system.")
@click.option(
    "--machine-timezone", metavar="ZONE", help="Time zone of the machine with the cron (default: this one's)."
)
@click.option("--image", help="Image with quantmint and vLLM; best by its digest.")
@click.option("--namespace", help="Namespace of the CronJob.")
@click.option("--pvc", "claims", metavar="CLAIM[:PATH]", multiple=True, help="Volume; the first one's is /work.")
@click.option("--node-selector", metavar="LABEL=VALUE", multiple=True, help="A label that the node must have.")
@click.option("--cpus", type=click.IntRange(min=1), help="CPU cores that are kept free for a pod.")
@click.option("--memory", type=click.IntRange(min=1), metavar="GB", help="Host memory that is kept free for a pod.")
@click.option(
    "--pod-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with what the cluster wants of every pod: tolerations, service account, sidecars.",
)
@click.option(
    "--secret",
    "secrets",
    metavar="NAME[=SECRET[:KEY]]",
    multiple=True,
    help="Variable from a Secret of the cluster (HF_TOKEN=hub:token), or a secret of the GitHub repository (NAME).",
)
@click.option("--runner", metavar="LABEL,LABEL", help="Labels of the runner: self-hosted,mi300x.")
@click.pass_context
def command(ctx: click.Context, /, recipes: tuple[str, ...], output: Path | None, **given: Any) -> int:
    """Print or write what makes a scheduler run `quantmint requantize RECIPE --due`.

    RECIPES: default are those of ./recipes that have a schedule. What the scheduler cannot keep of a schedule is
    refused with the reason; docs/scheduling.md compares them.
    """
    from pipeline.errors import UserError
    from pipeline.schedule.exported import write
    from pipeline.schedule.recipes import scheduled

    forms = [form for form in _FORMS if given[form]]
    if len(forms) != 1:
        found = " and ".join(_option(form) for form in forms) or "none"
        raise click.UsageError(f"found {found}, expected one of {', '.join(map(_option, _FORMS))}")
    (form,) = forms
    for name, belongs in _BELONGS.items():
        if form not in belongs and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{_flag(ctx, name)} belongs to {' and '.join(map(_option, belongs))}")
    items = scheduled([_there(name, form) for name in recipes])
    if not items:
        raise UserError(
            "no recipe of ./recipes has a schedule",
            hint="Give one to a recipe: refresh: {schedule: 0 3 * * 6, timezone: Europe/Berlin}",
        )
    files = _FILES[form](items, _export(ctx, form, given), given)
    if output is None:
        joint = "---\n" if form in ("kubernetes", "github_actions") else "\n"
        click.echo(joint.join(files.values()), nl=False)
    else:
        for path in write(files, output):
            click.echo(path)
    for note in _notes(form, items, given):
        click.echo(f"note: {note}", err=True)
    return 0


def _export(ctx: click.Context, form: str, given: Mapping[str, Any]) -> Export:
    """What all forms have in common, checked."""
    from datetime import UTC, datetime

    from pipeline.cluster.address import jobs_address_of
    from pipeline.errors import UserError
    from pipeline.schedule.exported import Export
    from pipeline.serving.running.child_environment import SECRET
    from pipeline.submit.pod import parse_pairs

    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            raise UserError(f"{_flag(ctx, name)}: found a line break or control character, expected plain text")
    variables = parse_pairs("--env", given["variables"])
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
            raise UserError(f"{_flag(ctx, name)}: found {given[name]!r}, expected an absolute path")
    if given["on"] is not None:
        known = variables if form == "kubernetes" else {}
        jobs_address_of(given["on"], known)  # a fault is told now, and not at three in the morning
        if form == "kubernetes" and given["on"] == "ray" and "RAY_ADDRESS" not in variables:
            raise UserError("--on: found ray, and a pod is no node of a Ray cluster", hint="--on http://HEAD:8265")
    return Export(
        program=tuple(shlex.split(given["program"])) if given["program"] else _program(form),
        made_by=_made_by(ctx),
        now=datetime.now(UTC),
        directory=given["directory"] or (str(Path.cwd()) if form in _HERE else None),
        store=given["store"],
        on=given["on"],
        variables=variables,
        environment_file=given["environment_file"],
        accepted=frozenset(given["accept"]),
    )


def _systemd(items: Sequence[Scheduled], export: Export, given: Mapping[str, Any]) -> dict[str, str]:
    from pipeline.schedule.systemd import units

    made = [units(item, export, system=given["system"], run_as=given["run_as"]) for item in items]
    return {name: text for files in made for name, text in files.items()}


def _cron(items: Sequence[Scheduled], export: Export, given: Mapping[str, Any]) -> dict[str, str]:
    from pipeline.schedule.crontab import crontab, zone_of_machine

    zone = given["machine_timezone"] or zone_of_machine()
    return crontab(items, export, machine_zone=zone, system=given["system"], run_as=given["run_as"])


def _kubernetes(items: Sequence[Scheduled], export: Export, given: Mapping[str, Any]) -> dict[str, str]:
    from pipeline.errors import UserError
    from pipeline.schedule.kubernetes import Cluster, cron_jobs
    from pipeline.submit.pod import parse_claim, parse_pairs, parse_reference
    from pipeline.submit.pod_template import read_template

    if given["image"] is None:
        raise UserError("found no image", hint="Name one that has quantmint and vLLM: --image NAME@sha256:...")
    cluster = Cluster(
        image=given["image"],
        namespace=given["namespace"],
        claims=tuple(map(parse_claim, given["claims"])),
        secrets=tuple(map(parse_reference, given["secrets"])),
        selector=parse_pairs("--node-selector", given["node_selector"]),
        cpus=given["cpus"],
        memory_gb=given["memory"],
        template=None if given["pod_template"] is None else read_template(given["pod_template"]),
    )
    return cron_jobs(items, export, cluster)


def _github(items: Sequence[Scheduled], export: Export, given: Mapping[str, Any]) -> dict[str, str]:
    from pipeline.schedule.github import workflow

    runner = [label.strip() for label in (given["runner"] or "").split(",") if label.strip()]
    made = [workflow(item, export, runner=runner, secrets=given["secrets"]) for item in items]
    return {name: text for files in made for name, text in files.items()}


_FILES = {"systemd": _systemd, "cron": _cron, "kubernetes": _kubernetes, "github_actions": _github}


def _notes(form: str, items: Sequence[Scheduled], given: Mapping[str, Any]) -> list[str]:
    """What is left to do by hand, for standard error."""
    import os

    from pipeline.schedule.github import needed

    timers = " ".join(f"quantmint-{item.name}.timer" for item in items)
    user = "" if given["system"] else " --user"
    folder = "/etc/systemd/system" if given["system"] else "~/.config/systemd/user"
    linger = "" if given["system"] else " && loginctl enable-linger"
    install = {
        "systemd": f"copy to {folder}, systemctl{user} daemon-reload && systemctl{user} enable --now {timers}{linger}",
        "cron": "copy to /etc/cron.d" if given["system"] else "crontab FILE replaces what the user's crontab had",
        "kubernetes": "kubectl apply -f FILE; ./recipes and the store are those of the volume",
        "github_actions": "copy to .github/workflows of the default branch; make the secrets that it names",
    }
    notes = [install[form]]
    wanted = sorted({name for item in items for name in needed(item.recipe)})
    if form in _HERE and wanted and given["environment_file"] is None:
        notes.append(f"{' and '.join(wanted)} come from --environment-file PATH; a login of the Hub's client does too")
    named = {text.partition("=")[0] for text in given["secrets"]}
    in_file = given["pod_template"] is not None  # where a variable may come from in many ways
    if form == "kubernetes" and not in_file and (missing := [name for name in wanted if name not in named]):
        notes.append(f"no Secret gives {' and '.join(missing)}: --secret {missing[0]}=SECRET:KEY")
    here = os.environ.get("QUANTMINT_VLLM")
    if form in _HERE and here and not any(text.startswith("QUANTMINT_VLLM=") for text in given["variables"]):
        notes.append(f"QUANTMINT_VLLM is known here, and not there: --env QUANTMINT_VLLM={shlex.quote(here)}")
    if form != "github_actions" and any(_keyless(item) for item in items):
        notes.append("signing without a key needs an identity that Sigstore knows, which nobody gives there")
    return notes


def _keyless(item: Scheduled) -> bool:
    return item.recipe.publish.sign is not None and item.recipe.publish.sign.keyless


def _program(form: str) -> tuple[str, ...]:
    """This quantmint where it runs on this machine, else the one that is on PATH there."""
    if form not in _HERE:
        return ("quantmint",)
    script = Path(sys.executable).with_name("quantmint")
    return (str(script),) if script.is_file() else (sys.executable, "-m", "pipeline")


def _there(name: str, form: str) -> str:
    """A recipe as the scheduled command names it: a path holds from everywhere on this machine."""
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    return str(Path(name).absolute()) if is_path and form in _HERE else name


def _made_by(ctx: click.Context) -> str:
    """The command line without recipes and folder, options in the order of --help."""
    words = ["quantmint", "schedule", "export"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if not isinstance(parameter, click.Option) or name == "output":
            continue
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[name]
        if parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            for text in value if parameter.multiple else (value,):
                words += [parameter.opts[0], str(text)]
    return shlex.join(words)


def _option(form: str) -> str:
    return f"--{form.replace('_', '-')}"


def _flag(ctx: click.Context, name: str) -> str:
    return next(parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
