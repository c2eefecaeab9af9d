"""quantmint serve, doctor: a model with the knobs that its hardware calls for, and whether this machine is ready."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import (
    MODEL_FOLDER,
    emit,
    json_option,
    store_option,
    vllm_option,
    vllm_version_option,
)

if TYPE_CHECKING:
    from quantmint.pipeline.runs.serving import ServeRequest
    from quantmint.pipeline.serving.host.context import HostFinding
    from quantmint.pipeline.serving.model.facts import ModelFacts
    from quantmint.pipeline.serving.planning.target import ServingTarget

_MARKS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}
_FORMS = ("explain", "json", "shell", "compose", "kubernetes")


@click.command(name="serve")
@click.argument("model")
@click.argument("arguments", metavar="[-- ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--target", help="mi300x:8, mi355x:16 (two nodes), cpu, auto (default: the recipe's, else auto).")
@click.option("--workload", help="latency, streaming, throughput, offline, or one of eval/workloads.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests in flight (default: the workload's).")
@click.option("--max-model-len", type=click.IntRange(min=16), help="Longest prompt with its answer, in tokens.")
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), help="Default: what the checkpoint has scales for."
)
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Overrule a knob; =false leaves it out.")
@click.option("--speculative", metavar="METHOD[:MODEL]:TOKENS", help="Speculative decoding.")
@click.option("--pack", type=click.IntRange(1, 8), help="Servers that share one GPU.")
@click.option("--baseline", is_flag=True, help="The 16-bit model of a recipe.")
@click.option("--config", type=MODEL_FOLDER, help="config.json of a recipe's model, to plan without a network.")
@click.option("--served-model-name", help="What clients call it (default: the folder's or recipe's name).")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Of the first server.")
@click.option("--launcher", type=click.Choice(["local", "docker", "endpoint"]), default="local", show_default=True)
@click.option("--endpoint", metavar="URL", help="A server that runs already, for --launcher endpoint.")
@click.option("--image", help="Container image (default: vLLM's own of the version).")
@click.option("--volume-claim", metavar="NAME", help="PersistentVolumeClaim with the model, for --kubernetes.")
@click.option("--host-ip", metavar="A,B,...", help="Addresses of several nodes on their private network, in order.")
@click.option("--node-rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which of them this is.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model's own Python code.")
@click.option("--startup-timeout", type=click.FloatRange(min=1), default=3600, show_default=True, help="Seconds.")
@vllm_option
@vllm_version_option
@click.option("--dry-run", is_flag=True, help="Print what would run. So do, in their own form, the five below.")
@click.option("--explain", is_flag=True, help="... with the reason and source of every knob.")
@click.option("--json", "json", is_flag=True, help="... as one JSON object.")
@click.option("--shell", is_flag=True, help="... as a script.")
@click.option("--compose", is_flag=True, help="... as a docker compose file.")
@click.option("--kubernetes", is_flag=True, help="... as a Kubernetes Deployment.")
@store_option
def serve(model: str, port: int, startup_timeout: float, dry_run: bool, **options: Any) -> int:
    """Serve MODEL with vLLM, with the knobs for its hardware and load, until Ctrl-C.

    MODEL is a folder, organisation/name[@revision] of the Hub, or a recipe: the checkpoint that it made, or its
    --baseline. Servers listen on the loopback interface, and use the GPUs that CUDA_VISIBLE_DEVICES leaves (on ROCm
    also HIP's and ROCR's variable). To plan, a config.json is enough. ARGUMENTS after two dashes go to vLLM unchanged.

    Example: quantmint serve llama70b-fp8kv --target mi300x:8 --explain
    """
    from quantmint.pipeline.runs.serving import serve as serve_until_stopped

    forms = [form for form in _FORMS if options[form]]
    if len(forms) > 1:
        raise click.UsageError(f"found --{' and --'.join(forms)}, expected one of them")
    request = _request(model, port, options, planning=dry_run or bool(forms))
    if dry_run or forms:
        _show(request, forms[0] if forms else "", options)
        return 0
    settings = {name: options[name] for name in ("image", "endpoint", "node_rank")}
    logs = options["store_path"] / "logs"
    return serve_until_stopped(request, options["launcher"], logs=logs, startup_timeout=startup_timeout, **settings)


def _request(model: str, port: int, options: dict[str, Any], *, planning: bool) -> ServeRequest:
    from quantmint.pipeline.recipe.serving import Serve
    from quantmint.pipeline.runs.serving import (
        ServeRequest,
        fetched,
        find_model,
        overrides_of,
        profile_for,
        speculation_of,
        target_for,
        vllm_for,
    )
    from quantmint.pipeline.serving.planning.request import ServingRequest

    version, environment = vllm_for(
        options["vllm"], options["vllm_version"], elsewhere=planning or options["launcher"] in ("docker", "endpoint")
    )
    served = find_model(
        model,
        store=options["store_path"],
        baseline=options["baseline"],
        config=options["config"],
        vllm=None if environment is None else str(environment.executable),
    )
    served.require_launcher("local" if planning else options["launcher"])
    recipe = served.recipe
    section = Serve() if recipe is None else recipe.serve
    target = target_for(options["target"], recipe)
    profile = profile_for(
        options["workload"], recipe, concurrency=options["concurrency"], max_model_len=options["max_model_len"]
    )
    trusted = options["trust_remote_code"] or (recipe is not None and recipe.trust_remote_code)
    if not planning and options["launcher"] != "endpoint":
        served = fetched(served, with_code=trusted, progress=reporter_for(json=False))
    return ServeRequest(
        served,
        ServingRequest(
            model=served.model,
            facts=served.facts,
            target=target,
            profile=profile,
            vllm_version=version,
            overrides={**section.overrides, **overrides_of(options["settings"])},
            kv_cache_dtype=options["kv_cache_dtype"],
            speculative=speculation_of(options["speculative"])
            if options["speculative"]
            else served.speculative(section),
            tunableop=None if served.tunableop is None else str(served.tunableop),
            servers_per_gpu=options["pack"] or section.pack,
            arguments=(*section.arguments, *options["arguments"]),
            served_model_name=options["served_model_name"] or served.name,
            trust_remote_code=trusted,
            cpu_threads=os.cpu_count() or 1,
        ),
        environment=environment,
        hosts=tuple(options["host_ip"].split(",")) if options["host_ip"] else (),
        port=port,
        node_rank=options["node_rank"],
        planning=planning or options["launcher"] == "endpoint",
    )


def _show(request: ServeRequest, form: str, options: dict[str, Any]) -> None:
    from quantmint.pipeline.serving.render.docker import compose
    from quantmint.pipeline.serving.render.explanation import explain
    from quantmint.pipeline.serving.render.invocation import script
    from quantmint.pipeline.serving.render.kubernetes import deployment

    plan, processes = request.plan()
    if form == "json":
        launched = [dataclasses.asdict(process) for process in processes]
        emit({**plan.to_json(), "processes": launched, "facts": _facts(request.model.facts)})
    elif form == "shell":
        click.echo(script(plan, processes), nl=False)
    elif form == "compose":
        click.echo(compose(plan, processes, image=options["image"]), nl=False)
    elif form == "kubernetes":
        click.echo(deployment(plan, image=options["image"], claim=options["volume_claim"]), nl=False)
    else:
        installed = None if request.environment is None else request.environment.version
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        click.echo(
            explain(plan, request.model.facts, processes, installed=installed, reasons=bool(form), width=width),
            nl=False,
        )
        if not form:
            click.echo("\n" + script(plan, processes), nl=False)


def _facts(facts: ModelFacts) -> dict[str, Any]:
    """Return the model's facts as JSON values, without its list of single weights, which would fill pages."""
    fact_fields = dataclasses.asdict(facts)
    shown = {field.name: fact_fields[field.name] for field in dataclasses.fields(facts) if field.compare}
    return {"family": facts.family, "density": facts.density, **shown}


@click.command(name="doctor")
@click.option(
    "--target", help="NAME:GPUS, as in mi300x:8, or auto for what this machine is (default: the recipe's, else auto)."
)
@click.option("--model", help="Checkpoint's folder, or a recipe: what its scheme needs is checked too.")
@vllm_option
@json_option
@click.option("--fix-script", is_flag=True, help="Print a bash script of the fixes that need root; nothing is run.")
def doctor(
    target: str | None,
    model: str | None,
    vllm: str | None,
    as_json: bool,
    fix_script: bool,
) -> int:
    """Check whether this machine is ready to serve. Each finding comes with its fix; nothing is changed.

    Ends with 0 where nothing fails, warnings allowed, with 1 where something does.

    Example: quantmint doctor --target mi300x:8
    """
    from quantmint.pipeline.base.machine import Host
    from quantmint.pipeline.serving.host.checks import run_checks
    from quantmint.pipeline.serving.host.context import gather_context, model_needs, root_fix_script
    from quantmint.pipeline.serving.planning.target import parse_target

    if as_json and fix_script:
        raise click.UsageError("--json and --fix-script both print on standard output: give one of them")
    needed, recipe_target = (None, None) if model is None else model_needs(model)
    machine = recipe_target if target is None else None if target == "auto" else parse_target(target)
    subject = gather_context(Host(), target=machine, vllm=vllm, checkpoint=needed)
    findings = run_checks(subject)
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        emit(
            {
                "target": str(subject.target),
                "detected": None if subject.detected is None else subject.detected.to_json(),
                "ready": not failed,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    elif fix_script:
        click.echo(root_fix_script(findings), nl=False)
    else:
        _print_findings(subject.target, findings)
    return 1 if failed else 0


def _print_findings(target: ServingTarget, findings: Sequence[HostFinding]) -> None:
    from rich.markup import escape

    from quantmint.pipeline.commands.tables import table, terminal

    console = terminal()
    what = target.hardware if target.accelerator.kind == "cpu" else str(target)
    console.print(f"[bold]{escape(what)}[/]  {escape(target.accelerator.title)}")
    rows = [
        (one.name, f"[{_MARKS[one.status]}]{one.status}[/]", escape(one.found), escape(one.expected))
        for one in findings
    ]
    shown = table("check", "status", "found", "expected", rows=rows)
    shown.columns[2].no_wrap = False
    console.print(shown)
    for finding in findings:
        if finding.fix:
            console.print(f"[{_MARKS[finding.status]}]{finding.name}[/]: {escape(finding.why)}")
            # Commands are copied: no line is broken.
            console.print(f"  {escape(finding.fix)}", soft_wrap=True)
            console.print(f"  [dim]source: {escape(finding.source)}[/]", soft_wrap=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
