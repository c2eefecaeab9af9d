"""Options that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
MODEL_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that gives a command all of these options, in their order."""
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


def emit(value: object) -> None:
    """Print JSON on standard output."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))
