"""quantmint plan: the stages of a recipe, what they take on which machine, and what its gate can show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.eval.report.numbers import duration
from quantmint.pipeline.commands.options import MODEL_FOLDER, emit, json_option, store_option, vllm_option

if TYPE_CHECKING:
    from rich.console import Console

    from quantmint.eval.gate.reach import SpeedReach
    from quantmint.pipeline.recipe.schema import Recipe
    from quantmint.pipeline.runs.forecast import RunForecast, StageForecast
_BASES = {"seen": "as last time", "reckoned": "forecast"}


@click.command(name="plan")
@click.argument("recipe")
@click.option(
    "--config",
    "config_folder",
    type=MODEL_FOLDER,
    help="Folder with the model's config.json, to plan without its weights and without a network.",
)
@click.option(
    "--for",
    "machine",
    metavar="NAME:GPUS",
    help="Machine to plan for, such as mi300x:8, or `here`. Default: the recipe's target where this is another one.",
)
@vllm_option
@store_option
@json_option
def plan_command(
    recipe: str, config_folder: Path | None, machine: str | None, vllm: str | None, store_path: Path, as_json: bool
) -> None:
    """Show the stages of RECIPE, which of them are cached, and what it takes: time, memory, disk.

    Nothing is made. Times are those of one machine, which is named: the recipe's target, or this one where it is the
    target. Ends with 2 where the disk of this machine is too small for a run here, or the recipe asks for the
    impossible.

    Example: quantmint plan llama70b-fp8kv --for mi300x:8
    """
    from quantmint.pipeline.api import plan

    forecast = plan(recipe, machine=machine, config=config_folder, store=store_path, vllm=vllm)
    if not as_json:
        _print_forecast(forecast)
    forecast.require_room()
    if as_json:
        emit(forecast.to_json())  # last: standard output holds one object, the plan or why there is none


def _by(recipe: Recipe) -> str:
    """Return " by GPTQ" where weights are not rounded to the nearest: a base recipe may say so unseen."""
    quantization = recipe.quantization
    names = {"none": "", "tuned": " by GPTQ, tuned"}
    return names.get(quantization.algorithm, f" by {quantization.algorithm.upper()}")


def _print_forecast(forecast: RunForecast) -> None:
    from rich.markup import escape

    from quantmint.pipeline.commands.tables import print_outlook, table, terminal

    console, recipe = terminal(), forecast.recipe
    source = recipe.source.repo or recipe.source.folder
    console.print(f"[bold]{recipe.name}[/]  {escape(recipe.description)}")
    console.print(
        f"{escape(str(source))} -> {recipe.quantization.scheme}{_by(recipe)}, KV cache {recipe.quantization.kv_cache}, "
        f"{recipe.quantization.format}, for {recipe.target.gpus} x {recipe.target.hardware}"
    )
    if forecast.setting.chosen is not None:
        console.print(forecast.setting.chosen.line)
    states = [
        (stage.stage, "cached" if stage.cached else "to do", *_time(stage), stage.fingerprint[:12])
        for stage in forecast.stages
    ]
    console.print(table("stage", "state", "time", "", "fingerprint", right=("time",), rows=states))
    console.print(total(forecast))
    for setting, seconds in forecast.savings:
        console.print(f"  {setting} would save about {duration(seconds)}")
    model = forecast.size
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in model.kept_because.items())
    modules = f"{model.quantized} modules quantized, {model.kept} kept: {reasons}"
    sizes = {
        "source": model.source,
        f"checkpoint ({modules}, {model.source / model.checkpoint:.2f} x smaller)": model.checkpoint,
        "weights on each device": model.weights_per_gpu,
        "KV cache for one token, all layers": model.kv_bytes_per_token,
        **{f"disk: {name}": count for name, count in forecast.disk_needed.items()},
        "disk: free" if forecast.machine == "here" else "disk: free on this machine, which is another": (
            forecast.disk_free
        ),
    }
    print_outlook(console, sizes, forecast.weights)
    _print_gate(console, forecast)
    for caution in forecast.cautions:
        console.print(f"[yellow]caution:[/] {escape(caution)}")


def _print_gate(console: Console, forecast: RunForecast) -> None:
    """Print what the gate can show: the loss for each task and for all of them, and the speedup."""
    from quantmint.pipeline.commands.tables import table

    tasks = [
        (
            name,
            f"{task.items:,}",
            "shown only" if task.margin is None else f"{task.margin:.2%}",
            f"{task.detectable:.2%}",
            f"{len(task.looks)}",
            "-" if task.expected is None else f"{task.expected:,}",
            "-" if task.passes is None else f"{task.passes:.0%}",
        )
        for name, task in forecast.gate.tasks.items()
    ]
    numbers = ("items", "margin", "detectable", "looks", "asked, about", "passes")
    console.print(table("task", *numbers, right=numbers, rows=tasks))
    console.print("detectable: the least margin that so many items can test; asked, passes: of a lossless candidate")
    console.print(
        f"all tasks: a lossless candidate passes with a chance of {forecast.gate.passes:.0%}; "
        f"one that loses all that the margins allow fails with one of {forecast.gate.false_fails:.0%} at most"
    )
    if (promised := forecast.recipe.gate.kl) is not None:
        times = [stage.seconds for stage in forecast.stages if stage.stage in ("kl-baseline", "kl-candidate")]
        price = f", about {duration(sum(seconds or 0.0 for seconds in times))}" if times else ""
        console.print(
            f"KL: at most {promised.max:g} nats by the upper end of an interval at {promised.confidence:.0%}{price}"
        )
    if forecast.bench:
        console.print(_throughput(forecast.bench, forecast.gate.speed))


def total(forecast: RunForecast) -> str:
    """Return a sentence on the time of the whole run, and of a search's further tries."""
    where = "on this machine" if forecast.machine == "here" else f"on {forecast.machine}"
    words = "at least" if forecast.not_predicted else "about"
    sentence = f"{words} {duration(forecast.seconds)} in all {where}, from here to the end"
    if forecast.not_predicted:
        sentence += f"; {', '.join(forecast.not_predicted)} not counted"
    if forecast.further_tries:
        count, most = forecast.further_tries, duration(forecast.seconds_of_all_tries)
        noun = "try" if count == 1 else "tries"
        sentence += f"; with {count} more {noun} of the search, which a FAIL or INCONCLUSIVE leads to, {words} {most}"
    return sentence


def _time(stage: StageForecast) -> tuple[str, str]:
    """Return a stage's time as text, and its origin; "?" and the reason where it is not predicted."""
    if stage.seconds is None:
        return "?", "not predicted: a library's time is not known before it ran once"
    return ("-", "") if stage.cached else (duration(stage.seconds), _BASES[str(stage.by)])


def _throughput(bench: Mapping[str, Any], speed: SpeedReach | None) -> str:
    """Return lines on what measuring the throughput takes, and the speedup that it can prove."""
    most = "at most " if bench.get("stop_early") else ""
    basis = "as assumed until some were seen" if bench["noise"] is None else "as last seen"
    lines = [
        f"throughput: {most}{bench['launches']} launches of {bench['prompts']:,} prompts, about "
        f"{duration(bench['seconds'])}, {basis}"
    ]
    if bench.get("reused"):
        lines.append(
            f"  {bench['reused']} of the baseline's launches are reused, of {str(bench['reused_from'])[:10]}; if the "
            f"fresh ones disagree with them, {bench['reused']} more are made"
        )
    if speed is not None and speed.least is not None:
        noise = "assumed" if bench["noise"] is None else "as last measured"
        lines.append(
            f"  with {speed.launches} launches a side and {speed.noise:.1%} noise ({noise}), a true speedup of "
            f"{speed.least:.3f} x is needed to prove {speed.min_ratio:g} x"
        )
    if speed is not None and speed.seen is not None:
        few = "more launches than a recipe can ask for" if speed.needed is None else f"{speed.needed} launches a side"
        lines.append(f"  to prove the {speed.seen:.3f} x of the last measurement takes {few}")
    return "\n".join(lines)
