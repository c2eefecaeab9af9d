"""Options that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from quantmint.pipeline.clusters.submit.pod import Pod

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
MODEL_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    return lambda function: reduce(lambda decorated, option: option(decorated), reversed(options), function)


device_option = click.option(
    "--device", default="auto", show_default=True, help="Where calibration and quantization compute."
)
store_option = click.option(
    "--store",
    "store_path",
    type=FOLDER,
    default=lambda: Path(os.environ.get("QUANTMINT_STORE", "store")),
    help="Folder of finished stages (default: $QUANTMINT_STORE, or ./store).",
)
remote_option = click.option(
    "--remote-store",
    "remote",
    metavar="URL",
    envvar="QUANTMINT_REMOTE_STORE",
    help="s3://bucket/prefix, gs://, az://, file://: what was measured at another site is taken from there, what "
    "is measured here is sent there (default: $QUANTMINT_REMOTE_STORE, or none).",
)
on_option = click.option(
    "--on",
    metavar="ray[://HEAD]",
    help="Calibrate and quantize on a Ray cluster whose nodes see these files: ray is $RAY_ADDRESS or this "
    "machine's (default: this process).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
vllm_option = click.option(
    "--vllm", help="`vllm` executable or its environment (default: $QUANTMINT_VLLM, .venv-vllm, PATH)."
)
vllm_version_option = click.option(
    "--vllm-version", metavar="VERSION", help="Plan for this version of vLLM instead of the one installed."
)
jobs_option = click.option(
    "--on",
    metavar="ray|http://HEAD:8265",
    help="Run each recipe as a job of a Ray cluster whose nodes see these files, on a node with GPUs free for it: "
    "ray is $RAY_ADDRESS or this machine's, else its dashboard.",
)
"""``--on``: where a fleet's recipes run, as a person names it."""
fleet_options = _together(
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
pod_options = _together(
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
    from quantmint.pipeline.clusters.submit.pod import Pod, parse_claim, parse_secret, read_template

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


def emit(value: object) -> None:
    """Print JSON on standard output."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))
