"""quantmint quantize MODEL OUT, and quantmint inspect PATH: a checkpoint without a recipe."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import PATH, device_option, emit, json_option, on_option

if TYPE_CHECKING:
    from quantmint.pipeline.api import QuantizedCheckpoint
    from quantmint.pipeline.runs.oneshot import Outlook, QuantizationJob

_QUANTIZATION = (
    *("scheme", "bits", "kv_cache", "kv_cache_granularity", "engine", "algorithm", "shared_scales", "keep", "mtp"),
)
_CALIBRATION = ("samples", "sequence_length", "packing", "batch_size", "seed", "observer", "experts")


@click.command(name="quantize")
@click.argument("src", metavar="MODEL")
@click.argument("out", type=PATH)
@click.option("--scheme", required=True, help="What linear layers become; `quantmint schemes` lists them.")
@click.option("--from", "from_", metavar="SCHEMES", help="What --scheme auto chooses from, with commas between.")
@click.option("--bits", type=float, help="What --scheme auto may spend: mean bits of a weight, scales counted.")
@click.option("--format", "layout", help="Layout: compressed-tensors (default) or quark.")
@click.option("--kv-cache", help="fp8: calibrated static scales. auto (default): 16 bit.")
@click.option("--kv-cache-granularity", help="tensor (default), or head: a scale for each KV head.")
@click.option("--engine", help="stream (default), llmcompressor or quark.")
@click.option("--algorithm", help="gptq, or tuned; awq, smoothquant, ... for the engines that are libraries.")
@click.option("--parameter", metavar="NAME=VALUE", multiple=True, help="Parameter of the algorithm, as in a recipe.")
@click.option("--shared-scales/--no-shared-scales", default=None, help="One FP8 scale for what vLLM fuses (default).")
@click.option("--exclude", metavar="NAME", multiple=True, help="Module that stays in 16 bit, or re:PATTERN.")
@click.option("--keep", help="source: excluded modules stay as the source quantizes them. bf16 (default): decoded.")
@click.option("--override", metavar="NAME=SCHEME", multiple=True, help="Module, or re:PATTERN, with another scheme.")
@click.option("--mtp", help="Layers of a multi-token predictor: source, bf16 (default), ptpc_fp8 or mxfp4.")
@click.option("--calibration", metavar="SET", help="Set that ranges are measured on: a name or a YAML file.")
@click.option("--samples", type=int, help="Sequences to measure on (default: the set's, else 512).")
@click.option("--sequence-length", type=int, help="Tokens of a sequence (default: the set's, else 2048).")
@click.option("--packing/--no-packing", default=None, help="Join texts, or take one a sequence (default: the set's).")
@click.option("--batch-size", type=int, help="Sequences run together (default: 8).")
@click.option("--seed", type=int, help="Seed of the choice of samples (default: the set's, else 0).")
@click.option("--observer", help="amax (default), percentile or mse: from inputs to a scale.")
@click.option("--experts", help="all (default) or routed: which tokens count for an expert.")
@device_option
@click.option("--threads", type=click.IntRange(min=1), help="Cores to compute with (default: all that are ours).")
@on_option
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run the model's own Python code.")
@click.option("--inspect/--no-inspect", default=True, show_default=True, help="Prove the result before it is whole.")
@click.option("--dry-run", is_flag=True, help="Print what would be made, and write nothing.")
@json_option
def quantize(src: str, out: Path, threads: int | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Quantize MODEL (a folder, or organisation/name[@revision] of the Hub) into the folder OUT, without a recipe.

    Nothing is served or judged. OUT gets its config.json when the checkpoint is complete and sound. The same command
    goes on with what was interrupted, and does nothing where OUT is finished.

    Example: quantmint quantize meta-llama/Llama-3.1-8B-Instruct out --scheme ptpc_fp8
    """
    from quantmint.pipeline.api import finish_quantization, open_quantization
    from quantmint.pipeline.runs.oneshot import look_ahead

    if threads is not None:  # before PyTorch is there, which reads it too
        os.environ["OMP_NUM_THREADS"] = str(threads)

    how = {name: options[name] for name in ("device", "inspect")}
    job = open_quantization(src, out, **_sections(options), **how, to_run=not dry_run)
    if dry_run:
        state = "finished" if job.finished else "goes on where it stopped" if job.begun else "nothing is there yet"
        _show_plan(job, look_ahead(job), state, as_json=as_json)
        return
    checkpoint = finish_quantization(job, on=options["on"], reporter=reporter_for(json=as_json))
    _show_result(job, checkpoint, as_json=as_json)


def _sections(options: dict[str, Any]) -> dict[str, Any]:
    calibration = {"set": options["calibration"], **{name: options[name] for name in _CALIBRATION}}
    useless = next((name for name, value in calibration.items() if value is not None), None)
    if options["calibration"] is None and useless is not None:
        raise click.UsageError(f"--{useless.replace('_', '-')}: found it without --calibration SET")
    return {
        "trust_remote_code": bool(options["trust_remote_code"]),
        "quantization": {
            **{name: options[name] for name in _QUANTIZATION},
            "from": None if options["from_"] is None else options["from_"].split(","),
            "format": options["layout"],
            "exclude": list(options["exclude"]),
            "overrides": _overrides(options["override"]),
            **_parameters(options["algorithm"], options["parameter"]),
        },
        "calibration": None if options["calibration"] is None else calibration,
    }


def _parameters(algorithm: str | None, texts: tuple[str, ...]) -> dict[str, Any]:
    """Return ``algorithm``'s parameters from ``NAME=VALUE`` texts, by its name.

    Raises `click.UsageError` for other texts.
    """
    import yaml

    if texts and algorithm is None:
        raise click.UsageError("--parameter: found it without --algorithm")
    pairs = [text.partition("=") for text in texts]
    if bad := next((name for name, equals, _ in pairs if not name or not equals), None):
        raise click.UsageError(f"--parameter: found {bad!r}, expected NAME=VALUE")
    values = {name: yaml.safe_load(value) for name, _, value in pairs}
    return {str(algorithm): values} if values else {}


def _overrides(texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the recipe's overrides from ``NAME=SCHEME`` texts; a pattern may itself contain an equals sign.

    Raises `click.UsageError` for other texts.
    """
    overrides: list[dict[str, Any]] = []
    for text in texts:
        name, equals, scheme = text.rpartition("=")
        if not equals or not name:
            raise click.UsageError(f"--override: found {text!r}, expected NAME=SCHEME")
        overrides.append({"modules": [name], "scheme": scheme})
    return overrides


def _show_plan(job: QuantizationJob, expected: Outlook, state: str, *, as_json: bool) -> None:
    from quantmint.pipeline.runs.weights import forecast_weights, machine_here
    from quantmint.pipeline.store.disk import free_bytes

    recipe, source = job.setting.recipe, job.setting.source
    prediction = expected.prediction
    machine = machine_here(job.setting.device)
    costs = forecast_weights(expected.source, expected.structure, recipe, machine, plans=expected.plans)
    facts: dict[str, Any] = {
        "source": source.to_json() if source.repo else str(source.folder),
        "out": str(job.out),
        "state": state,
        "schemes": dict(expected.schemes),
        "kept": prediction.kept,
        "predicted": asdict(prediction),
        "costs": costs.to_json(),
        "disk": {"needed": prediction.checkpoint + prediction.temporary, "free": free_bytes(job.out)},
        "cautions": list(costs.cautions),
    }
    if as_json:
        emit(facts)
        return
    from rich.markup import escape

    from quantmint.pipeline.commands.tables import print_outlook, table, terminal

    quantization, console = recipe.quantization, terminal()
    console.print(f"{escape(str(source.repo or source.folder))} -> {escape(str(job.out))} ({state})")
    console.print(f"{quantization.format}, KV cache {quantization.kv_cache}, engine {quantization.engine}")
    unquantized = {f"16 bit: {reason}": count for reason, count in prediction.kept_because.items()}
    schemes = (*expected.schemes.items(), *unquantized.items())
    rows = [(scheme, f"{count:,}") for scheme, count in schemes]
    console.print(table("scheme", "modules", right=("modules",), rows=rows))
    sizes = {
        "source": prediction.source,
        f"checkpoint ({prediction.source / prediction.checkpoint:.2f} x smaller)": prediction.checkpoint,
        "disk: layers of GPTQ": prediction.temporary or None,
        "disk: free": facts["disk"]["free"],
    }
    print_outlook(console, sizes, costs)
    for caution in costs.cautions:
        console.print(f"[yellow]caution:[/] {escape(caution)}")


def _show_result(job: QuantizationJob, checkpoint: QuantizedCheckpoint, *, as_json: bool) -> None:
    import shlex

    from quantmint.pipeline.base.errors import UserError
    from quantmint.pipeline.stages.source import require_tokenizer

    out, kv_cache = job.out, job.setting.recipe.quantization.kv_cache
    record, is_new = checkpoint.record, checkpoint.made
    serve: str | None = shlex.join(
        ["vllm", "serve", str(out), *(["--kv-cache-dtype", "fp8"] if kv_cache == "fp8" else [])]
    )
    try:
        require_tokenizer(out)
    except UserError:
        serve = None
    facts = {name: value for name, value in record.items() if name not in ("payload", "files")}
    if as_json:
        emit({"checkpoint": str(out.absolute()), "made": is_new, **facts, "serve": serve})
        return
    from quantmint.eval.report.numbers import size

    if not is_new:
        click.echo("finished before, with the same source and options: nothing to do")
    schemes = ", ".join(f"{count:,} modules in {scheme}" for scheme, count in record["schemes"].items())
    worst = record["worst"]
    later = f"none; `quantmint inspect {shlex.quote(str(out))} --source MODEL` makes up for it"
    lines = {
        "checkpoint": str(out),
        "size": f"{size(record['bytes'])} from {size(record['source_bytes'])}",
        "modules": f"{schemes}, {record['kept']:,} kept in 16 bit",
        "auto": "{bits:.2f} bits, predicted cost {cost:.3g} nats".format(**record["auto"])
        if "auto" in record
        else None,
        "time": ", ".join(f"{part} {seconds:.1f} s" for part, seconds in record["seconds"].items()),
        "exact": f"{record['exact']:,} modules hold their source's very numbers" if record["exact"] else None,
        "error": None if worst is None else f"least SQNR {worst['sqnr_db']:.1f} dB, of {worst['module']}",
        "inspection": record["inspection"] or later,
        "serve": serve or "not before a tokenizer lies beside it: the source has none, and vLLM needs one",
    }
    for name, text in lines.items():
        if text is not None:
            click.echo(f"{name:<12}{text}")


@click.command(name="inspect")
@click.argument("path", metavar="CHECKPOINT", type=PATH)
@click.option(
    "--source",
    type=PATH,
    help="The 16-bit model: measures the error of every layer and compares what was not quantized.",
)
@click.option("--allow-unit-kv-scales", is_flag=True, help="Accept KV scales of exactly 1.0.")
@click.option("--device", default="auto", show_default=True, help="Where numbers are compared.")
@json_option
def inspect(path: Path, source: Path | None, allow_unit_kv_scales: bool, device: str, as_json: bool) -> int:
    """Check that CHECKPOINT, compressed-tensors or Quark, holds what its config.json says.

    Ends with 0 where nothing contradicts anything, with 1 where something does.

    Example: quantmint inspect published/llama70b-fp8kv --source /models/llama70b
    """
    from quantmint.pipeline import api

    inspection = api.inspect(
        path,
        source,
        allow_unit_kv_scales=allow_unit_kv_scales,
        device=device,
        reporter=reporter_for(json=as_json),
    )
    if as_json:
        emit(inspection.to_json())
    else:
        click.echo(f"{'PASS' if inspection.passed else 'FAIL'}  {path} ({inspection.checkpoint_format})")
        click.echo(inspection.summary())
    return 0 if inspection.passed else 1
