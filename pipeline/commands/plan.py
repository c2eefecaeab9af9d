"""quantmint plan: the stages of a recipe, what they take on which machine, and what its gate can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.eval.report.numbers import duration, size
from quantmint.pipeline.commands.options import MODEL_FOLDER, emit, json_option, store_option, vllm_option
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.recipe.schema import Recipe
    from quantmint.pipeline.serving.planning.target import ServingTarget


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
    from quantmint.eval.gate.reach import reach
    from quantmint.pipeline.base.hardware import cautions
    from quantmint.pipeline.quantize.engines.algorithms import algorithm
    from quantmint.pipeline.runs.forecast import forecast, machine_here, machine_of
    from quantmint.pipeline.runs.planner import build_plan, foreseen, missing_stages
    from quantmint.pipeline.runs.preflight import (
        disk_needed,
        require_disk,
        require_room_to_publish,
        require_tokens,
    )
    from quantmint.pipeline.runs.search import stand_in, tried
    from quantmint.pipeline.runs.session import open_setting
    from quantmint.pipeline.runs.timeline import ahead, further_tries, reckoned, savings
    from quantmint.pipeline.serving.model.facts import schemes_of_experts
    from quantmint.pipeline.stages.bench import outlook
    from quantmint.pipeline.stages.checks import as_asked
    from quantmint.pipeline.stages.estimate import Estimate
    from quantmint.pipeline.stages.gate import policy_of
    from quantmint.pipeline.stages.sizes import model_for, predict
    from quantmint.pipeline.stages.source import config_folder as fetched
    from quantmint.pipeline.stages.source import require_tokenizer
    from quantmint.pipeline.store.disk import free_bytes

    setting = stand_in(open_setting(recipe, store=Store(store_path), vllm=vllm, config=config_folder))
    if setting.source.folder is not None:
        require_tokenizer(setting.source.folder)
    plan = foreseen(build_plan(setting), setting)
    missing = missing_stages(plan, setting)
    require_tokens(setting, missing)
    model = model_for(setting, config_folder or fetched(setting.source))
    prediction = predict(*model, setting.recipe)
    needed = disk_needed(prediction, missing, setting, plan)
    where = store_path.absolute()
    free = free_bytes(where)
    quantization, target, evaluation = setting.recipe.quantization, setting.recipe.target, setting.recipe.evaluation
    questions = as_asked(setting.suite, evaluation, setting.recipe.gate)
    chosen = setting.chosen
    auto: dict[str, Any] = {} if chosen is None else {"auto": {"said": chosen.line, **chosen.to_json()}}
    bench = outlook(setting) if any(planned.key == "bench" for planned in plan) else {}
    judged = reach(
        questions, policy_of(setting), evaluation.looks, noise=bench.get("noise"), seen=bench.get("ratio")
    ).to_json()
    elsewhere = _machine_elsewhere(machine, target.hardware, target.gpus)
    where_computed = machine_here(setting.device) if elsewhere is None else machine_of(elsewhere)
    costs = forecast(*model, setting.recipe, where_computed, written=setting.written)
    asked = {name: task["expected"] for name, task in judged["tasks"].items()}
    weights = {name: cost["seconds"] for name, cost in costs["stages"].items() if name != "start"}
    estimate = Estimate(setting, prediction, costs["rates"], weights, asked, bench.get("seconds"))
    times = ahead(
        plan,
        missing,
        setting,
        reckoned(plan, estimate),
        here=elsewhere is None,
    )
    seconds = {key: spent for key, (spent, _) in times.items()}
    unknown = [planned.key for planned in plan if planned.key not in seconds]
    total = sum(seconds.values()) + costs["rates"]["start"]
    tries, further = further_tries(setting, plan, seconds, [verdict for _, verdict in tried(setting)])
    harm = algorithm(quantization.algorithm).caution(quantization.schemes)
    experts = schemes_of_experts(quantization, setting.config)
    served = cautions(
        target.hardware, quantization.scheme, quantization.kv_cache, quantization.format, expert_schemes=experts
    )
    told = {
        "recipe": setting.recipe.name,
        **auto,
        "source": setting.source.to_json(),
        "stages": [
            {
                "stage": p.key,
                "fingerprint": p.fingerprint,
                "cached": p.key not in missing,
                **dict(zip(("seconds", "by"), times.get(p.key, (None, None)), strict=True)),
            }
            for p in plan
        ],
        "machine": "here" if elsewhere is None else str(elsewhere),
        "seconds": total,
        "not_predicted": unknown,
        **({"further_tries": tries, "seconds_of_all_tries": total + further} if tries else {}),
        "savings": [{"setting": what, "seconds": saved} for what, saved in savings(seconds, setting)],
        "predicted": asdict(prediction),
        "costs": costs,
        "disk": {"needed": needed, "free": free, "where": str(where)},
        "gate": judged,
        "bench": bench or None,
        "cautions": [*filter(None, (harm,)), *served, *_too_small(needed, free, where, elsewhere)],
    }
    if not as_json:
        _print_plan(setting.recipe, told)
    if elsewhere is None:
        require_disk(needed, free, str(where))
        require_room_to_publish(setting, prediction, missing)
    if as_json:
        emit(told)  # last: standard output holds one object, the plan or why there is none


def _machine_elsewhere(asked: str | None, hardware: str, gpus: int) -> ServingTarget | None:
    """Return the machine to plan for, None for this one: as was asked, else the recipe's target where that is another.

    Raises `UserError` for a machine that no table has figures of.
    """
    from quantmint.pipeline.serving.host.detect import local_device
    from quantmint.pipeline.serving.planning.target import parse_target

    if asked is not None:
        return None if asked == "here" else _machine_named(asked)
    here = local_device("auto").hardware
    return None if hardware in ("cpu", here) or hardware not in _have_figures() else parse_target(f"{hardware}:{gpus}")


def _machine_named(text: str) -> ServingTarget:
    from quantmint.pipeline.base.errors import UserError, did_you_mean
    from quantmint.pipeline.base.hardware import table
    from quantmint.pipeline.serving.planning.target import parse_target

    name, rows, planned = text.partition(":")[0].lower(), table(), _have_figures()
    if name not in planned:
        found = f"{text!r}, which has no figures" if name in rows else repr(text)
        expected = ", ".join(("here", *planned))
        raise UserError(
            f"--for: found {found}, expected {expected}{did_you_mean(name, ('here', *planned))}.",
            hint="As in --for mi300x:8.",
        )
    try:
        return parse_target(text)
    except UserError as error:
        nearest = f' (did you mean "{name}:{rows[name].gpus_per_node}"?)'
        raise UserError(f"--for: found {text!r}: {error.message}{nearest}.", hint=error.hint) from None


def _have_figures() -> list[str]:
    """Return the names of the hardware that a forecast has figures of."""
    from quantmint.pipeline.base.hardware import table

    return [row.name for row in table().values() if row.bandwidth is not None or row.kind == "cpu"]


def _too_small(needed: Mapping[str, int], free: int, where: Path, elsewhere: ServingTarget | None) -> list[str]:
    """Return a caution that this machine's disk would not do, where another machine is planned for."""
    total = sum(needed.values())
    if elsewhere is None or total <= free:
        return []
    return [f"{size(total)} are needed where it runs; on this machine {where} has {size(free)}"]


def _print_plan(recipe: Recipe, told: Mapping[str, Any]) -> None:
    from rich.markup import escape

    from quantmint.pipeline.commands.tables import print_outlook, table, terminal

    console = terminal()
    source = recipe.source.repo or recipe.source.folder
    console.print(f"[bold]{recipe.name}[/]  {escape(recipe.description)}")
    console.print(
        f"{escape(str(source))} -> {recipe.quantization.scheme}, KV cache {recipe.quantization.kv_cache}, "
        f"{recipe.quantization.format}, for {recipe.target.gpus} x {recipe.target.hardware}"
    )
    if "auto" in told:
        console.print(told["auto"]["said"])
    states = [
        (one["stage"], "cached" if one["cached"] else "to do", *_took(one), one["fingerprint"][:12])
        for one in told["stages"]
    ]
    console.print(table("stage", "state", "time", "", "fingerprint", right=("time",), rows=states))
    console.print(_total(told))
    for saving in told["savings"]:
        console.print(f"  {saving['setting']} would save about {duration(saving['seconds'])}")
    predicted, disk = told["predicted"], told["disk"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in predicted["kept_because"].items())
    modules = f"{predicted['quantized']} modules quantized, {predicted['kept']} kept: {reasons}"
    ratio = predicted["source"] / predicted["checkpoint"]
    sizes = {
        "source": predicted["source"],
        f"checkpoint ({modules}, {ratio:.2f} x smaller)": predicted["checkpoint"],
        "weights on each device": predicted["weights_per_gpu"],
        "KV cache for one token, all layers": predicted["kv_bytes_per_token"],
        **{f"disk: {name}": count for name, count in disk["needed"].items()},
        "disk: free" if told["machine"] == "here" else "disk: free on this machine, which is another": disk["free"],
    }
    print_outlook(console, sizes, told["costs"])
    tasks = [
        (
            name,
            f"{task['items']:,}",
            "shown only" if task["margin"] is None else f"{task['margin']:.2%}",
            f"{task['detectable']:.2%}",
            f"{len(task['looks'])}",
            "-" if task["expected"] is None else f"{task['expected']:,}",
            "-" if task["passes"] is None else f"{task['passes']:.0%}",
        )
        for name, task in told["gate"]["tasks"].items()
    ]
    numbers = ("items", "margin", "detectable", "looks", "asked, about", "passes")
    console.print(table("task", *numbers, right=numbers, rows=tasks))
    console.print("detectable: the least margin that so many items can test; asked, passes: of a lossless candidate")
    console.print(
        f"all tasks: a lossless candidate passes with a chance of {told['gate']['passes']:.0%}; "
        f"one that loses all that the margins allow fails with one of {told['gate']['false_fails']:.0%} at most"
    )
    if told["bench"] is not None:
        console.print(_ahead(told["bench"], told["gate"]["speed"]))
    for caution in told["cautions"]:
        console.print(f"[yellow]caution:[/] {escape(caution)}")


def _total(told: Mapping[str, Any]) -> str:
    """Say what the whole run takes, as far as it is known."""
    where = "on this machine" if told["machine"] == "here" else f"on {told['machine']}"
    missing = told["not_predicted"]
    words = "at least" if missing else "about"
    sentence = f"{words} {duration(told['seconds'])} in all {where}, from here to the end"
    if missing:
        sentence += f"; {', '.join(missing)} not counted"
    if told.get("further_tries"):
        most, count = duration(told["seconds_of_all_tries"]), told["further_tries"]
        noun = "try" if count == 1 else "tries"
        sentence += f"; with {count} more {noun} of the search, which a FAIL or INCONCLUSIVE leads to, {words} {most}"
    return sentence


def _took(stage: Mapping[str, Any]) -> tuple[str, str]:
    """A stage's time and where it is known from."""
    if stage["seconds"] is None:
        return "?", "not predicted: a library's time is not known before it ran once"
    return ("-", "") if stage["cached"] else (duration(stage["seconds"]), stage["by"].replace("seen", "as last time"))


def _ahead(bench: Mapping[str, Any], speed: Mapping[str, Any] | None) -> str:
    """What measuring the throughput takes, and what it can show."""
    most = "at most " if bench.get("stop_early") else ""
    assumed = "as assumed until some were seen" if bench["noise"] is None else "as last seen"
    said = [
        f"throughput: {most}{bench['launches']} launches of {bench['prompts']:,} prompts, about "
        f"{duration(bench['seconds'])}, {assumed}"
    ]
    if speed is not None and speed["least"] is not None:
        said.append(
            f"  {speed['launches']} a side show {speed['min_ratio']:g} x of a checkpoint that really has "
            f"{speed['least']:.3f} x, where launches lie {speed['noise']:.1%} apart, {assumed}"
        )
    if speed is not None and speed["seen"] is not None:
        few = "more than a recipe can ask for" if speed["needed"] is None else f"{speed['needed']} a side"
        said.append(f"  for the {speed['seen']:.3f} x that was last seen it takes {few}")
    return "\n".join(said)
