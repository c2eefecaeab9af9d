"""Options for clusters: those of commands that run elsewhere, and their values read as the clusters take them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.submit.job import require_printable
from quantmint.pipeline.commands.options import (
    FILE,
    device_option,
    json_option,
    remote_option,
    store_option,
    together,
    vllm_option,
)

if TYPE_CHECKING:
    from quantmint.pipeline.clusters.submit.pod import Pod, SecretVariable, VolumeClaim

_SBATCH = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

jobs_option = click.option(
    "--on",
    metavar="ray|http://HEAD:8265",
    help="Run each recipe as a job of a Ray cluster whose nodes see these files, on a node with GPUs free for it: "
    "ray is $RAY_ADDRESS or this machine's, else its dashboard.",
)
"""``--on``: where a fleet's recipes run, as a person names it."""
fleet_options = together(
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="Recipes at a time (default: one for each device, one without any; --on: all).",
    ),
    jobs_option,
    click.option(
        "--metrics-file",
        type=FILE,
        help="Keep metrics for Prometheus in this file, for the node exporter's textfile collector.",
    ),
    device_option,
    vllm_option,
    store_option,
    remote_option,
    json_option,
)
pod_options = together(
    click.option("--namespace", help="Kubernetes: namespace (default: the context's)."),
    click.option("--image", default=lambda: os.environ.get("QUANTMINT_IMAGE"), help="Kubernetes: best NAME@sha256:..."),
    click.option(
        "--pvc", "claims", metavar="CLAIM[:/PATH]", multiple=True, help="Kubernetes: volume; the first is /work."
    ),
    click.option(
        "--pod-template",
        type=FILE,
        help="Kubernetes: YAML file with what the cluster wants of every pod: tolerations, sidecars.",
    ),
    click.option(
        "--secret",
        "secrets",
        metavar="VAR=SECRET[:KEY]",
        multiple=True,
        help="Kubernetes: such as HF_TOKEN=hub:token. GitHub: NAME, a secret of the repository.",
    ),
)
"""What a pod gets from its cluster; `pod_of` reads them."""


def pod_of(options: Mapping[str, Any], **fields: Any) -> Pod:
    """Return the pod that the options of `pod_options` describe; ``fields`` are further fields of `Pod`."""
    from quantmint.pipeline.clusters.submit.pod import Pod, read_template

    return Pod(
        image=options["image"],
        claims=tuple(map(parse_claim, options["claims"])),
        secrets=tuple(map(parse_secret, options["secrets"])),
        template=None if options["pod_template"] is None else read_template(options["pod_template"]),
        **fields,
    )


def refuse_foreign(context: click.Context, chosen: str, belongs: Mapping[str, Sequence[str]]) -> None:
    """Raise a usage error for an option on the command line that belongs to another choice than ``chosen``.

    ``belongs`` has, by option, the choices that it belongs to; other options belong to all.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        places = belongs.get(str(parameter.name), (chosen,))
        if chosen not in places and source is click.core.ParameterSource.COMMANDLINE:
            owners = " and ".join(place.replace("_", "-") for place in places)
            raise click.UsageError(f"{parameter.opts[0]} is for {owners}, not for {chosen.replace('_', '-')}")


def dashboard_address(on: str | None) -> str | None:
    """Return the address for `quantmint submit --ray` from the option ``--on``; None without the option.

    ``ray`` becomes ``auto``, with which Ray finds the same cluster as `ray_address`; ``http://HEAD:PORT`` is the
    dashboard's own address. Raises `UserError` for anything else.
    """
    from quantmint.pipeline.clusters.ray.nodes import HOST_PORT, LOCAL_CLUSTER, VARIABLE

    if on not in (None, "ray") and re.fullmatch(f"https?://{HOST_PORT}", str(on)) is None:
        expected = f"ray ({VARIABLE}'s cluster or this machine's) or http://HEAD:8265"
        raise UserError(f"--on: found {on!r}, expected {expected}")
    return LOCAL_CLUSTER if on == "ray" else on


def parse_claim(text: str) -> VolumeClaim:
    """Parse ``NAME`` or ``NAME:/path``."""
    from quantmint.pipeline.clusters.submit.pod import VolumeClaim

    name, _, path = text.partition(":")
    return VolumeClaim(name, path) if path else VolumeClaim(name)


def parse_secret(text: str) -> SecretVariable:
    """Parse ``VARIABLE=SECRET`` or ``VARIABLE=SECRET:KEY``; the default key is the variable's name."""
    from quantmint.pipeline.clusters.submit.pod import SecretVariable

    variable, _, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not secret:
        raise UserError(f"--secret: found {variable!r}, expected VARIABLE=SECRET[:KEY], as in HF_TOKEN=hub:token")
    return SecretVariable(variable, secret, key or variable)


def parse_variables(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` texts of a repeated option."""
    variables = {}
    for text in values:
        name, equals, variables[name] = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option}: found {name!r}, expected NAME=VALUE")
    return variables


def parse_sbatch(values: tuple[str, ...]) -> dict[str, str | Literal[True]]:
    """Parse ``NAME=VALUE``, or ``NAME`` for an option without a value. Raises `UserError` for other names."""
    options: dict[str, str | Literal[True]] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not _SBATCH.fullmatch(name):
            raise UserError(f"--sbatch: found {name!r}, expected NAME=VALUE or NAME, as in mail-type=END or exclusive")
        options[name.replace("_", "-")] = value if equals else True
    return options


def parse_mount(text: str) -> str:
    """Return ``/path`` or ``/path:/path-inside`` as ``source:target``. Raises `UserError` for other paths."""
    source, _, target = text.partition(":")
    for path in (source, target or source):
        require_printable("--mount", path)
        if not path.startswith("/") or set(path) & set(",:"):
            raise UserError(f"--mount: found {text!r}, expected /path or /path:/path, without commas")
    return f"{source}:{target or source}"
