"""quantmint schedule run [RECIPES]"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from pipeline.commands.options import (
    device_option,
    devices_option,
    jobs_address,
    jobs_option,
    json_option,
    remote_option,
    store_option,
    vllm_option,
)


@click.command(name="run")
@click.argument("recipes", nargs=-1)
@click.option("--jobs", type=click.IntRange(min=1), help="Recipes at a time (default: one for each device; --on: all).")
@devices_option
@jobs_option
@click.option("--retries", type=click.IntRange(min=0), default=3, show_default=True, help="After faults that pass.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Answer Prometheus here, at /metrics.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address that the port is opened at.")
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep metrics in this file, NAME.prom, for the node exporter.",
)
@click.option("--once-missed", is_flag=True, help="Only see to what was missed since the last scheduler, then end.")
@device_option
@vllm_option
@store_option
@remote_option
@json_option
def command(
    recipes: tuple[str, ...],
    jobs: int | None,
    devices: tuple[int, ...] | None,
    on: str | None,
    retries: int,
    metrics_port: int | None,
    metrics_host: str,
    metrics_file: Path | None,
    once_missed: bool,
    device: str,
    vllm: str | None,
    store_path: Path,
    remote: str | None,
    as_json: bool,
) -> int:
    """Stay, and look at RECIPES at the times of their `refresh:` section (default: those of ./recipes that have one).

    Recipes are read again when their files change, and on SIGHUP. SIGTERM and SIGINT end what runs; it goes on from its
    last commit when a scheduler runs again. Several may run on one store. --json prints a JSON object a line.
    QUANTMINT_WEBHOOK names addresses that are told how it goes; docs/notices.md says what they are sent.
    """
    from pipeline.fleet.requests import Options
    from pipeline.notices.outlets import outlets
    from pipeline.schedule.journal import Journal
    from pipeline.schedule.service import Service

    def write(line: str) -> None:
        with suppress(OSError, ValueError):  # who read the lines is gone: the schedule is not
            click.echo(line)

    journal = Journal(write, as_json)
    options = Options(
        store=store_path,
        jobs=jobs,
        devices=devices,
        retries=retries,
        on=jobs_address(on, devices),
        vllm=vllm,
        remote=remote,
        device=device,
    )
    with outlets(
        store_path,
        warn=journal.warn,
        metrics_file=metrics_file,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    ) as told:
        return Service(options, recipes, journal, told).run(once=once_missed)
