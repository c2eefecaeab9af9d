"""quantmint submit RECIPE --slurm | --kubernetes | --ray ADDRESS"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantmint.pipeline.clusters.submit.job import JobRequest, JobState, Scheduler, follow, request_job
from quantmint.pipeline.commands.cluster_options import (
    parse_mount,
    parse_sbatch,
    parse_variables,
    pod_of,
    pod_options,
    refuse_foreign,
)
from quantmint.pipeline.commands.options import emit, json_option, store_option

_FOR = {
    **dict.fromkeys(("partition", "sbatch", "setup", "container", "mount"), ("slurm",)),
    **dict.fromkeys(("namespace", "image", "claims", "workdir", "secrets", "pod_template"), ("kubernetes",)),
    "attached": ("ray",),
    "env": ("kubernetes", "ray"),
}


@click.command(name="submit")
@click.argument("recipe", required=False)
@click.argument("arguments", metavar="[-- ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--slurm", "place_name", flag_value="slurm", help="To the cluster whose sbatch is on PATH.")
@click.option("--kubernetes", "place_name", flag_value="kubernetes", help="To the cluster of the kubeconfig's context.")
@click.option(
    "--ray", "ray_address", metavar="ADDRESS", help="To a Ray cluster's dashboard: http://HEAD:8265, or auto."
)
@click.option("--gpus", type=click.IntRange(min=0), help="GPUs of the run (default: target.gpus; a CPU target: none).")
@click.option("--cpus", type=click.IntRange(min=1), help="CPU cores of a node (default: the cluster's).")
@click.option("--memory", type=click.IntRange(min=1), metavar="GB", help="Host memory of a node.")
@click.option("--time", "limit", metavar="DURATION", help="Time limit, such as 8h or 90m.")
@click.option("--env", metavar="NAME=VALUE", multiple=True, help="A plain variable. Kubernetes, Ray.")
@click.option("--partition", help="Slurm.")
@click.option("--sbatch", metavar="NAME[=VALUE]", multiple=True, help="Slurm: any other option, as in account=team.")
@click.option("--setup", metavar="COMMAND", multiple=True, help="Slurm: comes first, such as 'module load rocm'.")
@click.option("--container", metavar="IMAGE", help="Slurm: an image (pyxis), or a .sif file (Apptainer).")
@click.option(
    "--mount",
    metavar="/PATH[:/PATH]",
    multiple=True,
    help="Slurm: what else the container sees, such as a model's folder.",
)
@pod_options
@click.option("--workdir", metavar="/path", help="Kubernetes: where the run starts (default: the first volume).")
@click.option("--follow", is_flag=True, help="Show why it waits, then the log; end with the run's exit code.")
@click.option(
    "--attached",
    is_flag=True,
    help="Ray: as if it ran here: the log on standard error, the run's own JSON and exit code, and it ends with us.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print exactly what would be sent; start nothing. Kubernetes: the API server says whether it would take it.",
)
@click.option("--status", metavar="ID", help="Say how a job is, instead of submitting one; with --follow its log.")
@store_option
@json_option
@click.pass_context
def command(context: click.Context, /, **options: Any) -> int:
    """Run RECIPE on a cluster: `quantmint run` with the same working folder and store, on a shared filesystem.

    ARGUMENTS after two dashes go to `quantmint run`, such as `-- --until inspect`. A job that Slurm preempted or
    Kubernetes evicted is run again and goes on where it stopped; on Slurm also one that reached its time limit.

    Example: quantmint submit llama70b-fp8kv --slurm --partition mi300x --time 8h --follow
    """
    if (options["place_name"] is None) == (options["ray_address"] is None):
        raise click.UsageError("expected one place: --slurm, --kubernetes or --ray ADDRESS")
    name = options["place_name"] or "ray"
    refuse_foreign(context, name, _FOR)
    place = _place(name, options)
    as_json, status = options["as_json"], options["status"]
    if status is not None:
        if options["follow"]:
            return _follow(place, {"id": status, "place": name}, as_json)
        state = place.state(status)
        return _tell({"id": status, "place": name, **_plain(state)}, as_json)
    if options["recipe"] is None:
        raise click.UsageError("missing RECIPE")
    task = _task(options)
    if options["dry_run"]:
        from quantmint.pipeline.clusters.submit.kubernetes import Kubernetes

        click.echo(place.describe(task), nl=False)
        if isinstance(place, Kubernetes) and (away := place.check(task)) is not None:
            click.echo(f"note: no API server has looked at it: {away}", err=True)
        return 0
    if options["attached"]:
        from quantmint.pipeline.clusters.submit.ray import RayJobs, run_attached

        assert isinstance(place, RayJobs)  # noqa: S101 - the option is refused elsewhere
        code, printed = run_attached(place, task, lambda piece: click.echo(piece, nl=False, err=True))
        click.echo(printed, nl=False)
        return code
    submitted = place.submit(task)
    answer = {"id": submitted.identifier, "place": name, "log": submitted.log}
    if not options["follow"]:
        return _tell(answer, as_json)
    click.echo(f"{submitted.identifier}  {submitted.log}", err=True)
    return _follow(place, answer, as_json)


def _place(name: str, given: dict[str, Any]) -> Scheduler:
    variables = parse_variables("--env", given["env"])
    if name == "slurm":
        from huggingface_hub import constants

        from quantmint.pipeline.clusters.submit import slurm

        options = slurm.SlurmOptions(
            **{key: given[key] for key in ("partition", "container")},
            sbatch=parse_sbatch(given["sbatch"]),
            setup=given["setup"],
            mounts=tuple(map(parse_mount, given["mount"])),
            hub=Path(constants.HF_HOME).absolute() if given["container"] else None,
        )
        return slurm.Slurm(options, folder=Path.cwd(), logs=given["store_path"].absolute() / "logs" / "slurm")
    if name == "kubernetes":
        from quantmint.pipeline.clusters.submit.kubernetes import Kubernetes

        pod = pod_of(given, folder=given["workdir"], variables=variables)
        return Kubernetes(pod if given["image"] else None, namespace=given["namespace"])
    from quantmint.pipeline.clusters.submit import ray

    return ray.RayJobs(given["ray_address"], Path.cwd(), variables)


def _task(options: dict[str, Any]) -> JobRequest:
    """Return the job to submit, after checking recipe and arguments here as the run would hours later.

    Raises `RecipeError` for a recipe with faults, `click.UsageError` for wrong arguments.
    """
    from quantmint.pipeline.base.times import parse_duration
    from quantmint.pipeline.commands import run
    from quantmint.pipeline.recipe.faults import refuse
    from quantmint.pipeline.recipe.load import load_recipe
    from quantmint.pipeline.stages.checks import check

    loaded = load_recipe(options["recipe"])
    refuse(check(loaded))
    run.run.make_context("run", [options["recipe"], *options["arguments"]])
    return request_job(
        loaded.recipe,
        options["recipe"],
        store=str(options["store_path"]),
        **{name: options[name] for name in ("gpus", "cpus", "arguments")},
        memory_gb=options["memory"],
        seconds=None if options["limit"] is None else parse_duration(options["limit"]),
    )


def _follow(place: Scheduler, answer: dict[str, Any], as_json: bool) -> int:
    """Print the job's log as it grows, on standard error with ``as_json``.

    Return the run's exit code, or 130 after Ctrl-C.
    """
    heard: set[str] = set()

    def look(state: JobState) -> None:
        if state.waits is not None and state.waits not in heard:
            heard.add(state.waits)
            click.echo(f"waits: {state.waits}", err=True)

    try:
        state = follow(place, answer["id"], lambda piece: click.echo(piece, nl=False, err=as_json), look)
    except KeyboardInterrupt:
        click.echo(f"\nno longer followed; the job goes on. --status {answer['id']} --follow looks again.", err=True)
        return 130
    if as_json:
        emit({**answer, **_plain(state)})
    else:
        click.echo(f"{answer['id']}  {state.status}", err=True)
    return state.exit_code or 0


def _plain(state: JobState) -> dict[str, Any]:
    return {"state": state.status, "exit_code": state.exit_code, "waits": state.waits}


def _tell(answer: dict[str, Any], as_json: bool) -> int:
    if as_json:
        emit(answer)
        return 0
    hidden = ("place", "waits")
    click.echo("  ".join(str(value) for key, value in answer.items() if key not in hidden and value is not None))
    if answer.get("waits") is not None:
        click.echo(f"waits: {answer['waits']}")
    return 0
