"""How fast vLLM serves quantized checkpoints beside their 16-bit model: ratios with intervals, by fresh launches.

::

    python -m tests.bench.throughput --hardware h100 --minutes 15 --json h100.json --plot h100.svg
    python -m tests.bench.throughput --shape tiny --hardware cpu --workload tiny --case ptpc_fp8 --launches 2

A Llama of random weights is written to ``--work``; then the pipeline's own stages quantize it and launch and measure
its checkpoints by turns, and the gate's own rules judge each cell. One baseline serves all cases: its launches stand
between theirs, and are held against each other too, which must say 1.00. Rounds go on until there are ``--launches`` of
each case, or until the next one would end after ``--minutes``; figures are written after every launch, and the same
command goes on after an interruption. Random weights say nothing of accuracy, which is why nothing is asked, and of
speed all there is: nothing in these models depends on a value.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import yaml

from quantmint.eval.gate import throughput
from quantmint.eval.gate.report import Finding, Policy
from quantmint.eval.gate.validity import check_launches
from quantmint.eval.measurements import Launch, Measurements, Server, Side, StructureCheck
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.progress import Reporter, reporter_for
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.stages.launch_series import LAUNCH, Turn, discarded_launch, make_launch
from quantmint.pipeline.stages.servers import Servers
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job, Planned
from quantmint.pipeline.store.tree import Store
from tests.bench.model import SHAPES, describe, write_model

BASELINE = "bf16"
CASES: Mapping[str, dict[str, str]] = {
    "ptpc_fp8": {"scheme": "ptpc_fp8"},
    "ptpc_fp8+kv": {"scheme": "ptpc_fp8", "kv_cache": "fp8"},
    "fp8+kv": {"scheme": "fp8", "kv_cache": "fp8"},
    "mxfp4": {"scheme": "mxfp4"},  # other GPUs than MI350X and MI355X widen its weights on the way
}
WORKLOAD = Path(__file__).with_name("serving-8b.yaml")


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--hardware", required=True, help="Name of the table: what this machine is, and what the promise is for.")
@click.option("--gpus", default=1, show_default=True, help="GPUs of a launch; `--serve` says how they share a model.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="By value; the last may be left.")
@click.option("--launches", default=4, show_default=True, help="Fresh launches of each case.")
@click.option("--minutes", type=float, help="Begin no launch that would end later. Default: no limit.")
@click.option("--promise", default=1.1, show_default=True, help="Least ratio of output tokens/s.")
@click.option("--workload", default=str(WORKLOAD), show_default=True)
@click.option("--serve", default="{}", metavar="YAML", help="Of recipes: '{arguments: [--api-server-count, 2]}'.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("bench-throughput"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them here (SVG).")
def main(
    shape: str,
    hardware: str,
    gpus: int,
    cases: tuple[str, ...],
    launches: int,
    minutes: float | None,
    promise: float,
    workload: str,
    serve: str,
    work: Path,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure, judge, print."""
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    cases = cases or ("ptpc_fp8", "fp8+kv", "mxfp4")
    model = model_in(work, shape)
    recipes = {
        case: write_recipe(
            work, model, case, {"hardware": hardware, "gpus": gpus, "workload": workload}, yaml.safe_load(serve)
        )
        for case in cases
    }
    found: dict[str, Any] = {
        "shape": shape,
        "hardware": hardware,
        "gpus": gpus,
        "machine": describe("cpu" if hardware == "cpu" else "cuda:0"),
        "workload": Path(workload).stem,
        "promise": promise,
    }
    for said in series(work, recipes, order(cases, launches), ends, promise):
        found |= said
        if json_file is not None:  # what is there is kept when the machine goes
            json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        click.echo(table(found))
        if plot_file is not None and any(result["cells"] for result in found["cases"].values()):
            from tests.bench import plots

            plots.serving(found, plot_file)


def order(cases: Sequence[str], launches: int) -> list[str]:
    """What is launched, in this order: the baseline before every second case, and every second round from its end.

    >>> order(["a", "b", "c"], 2)
    ['bf16', 'a', 'b', 'bf16', 'c', 'bf16', 'c', 'bf16', 'b', 'a', 'bf16']
    """
    once = [name for number, case in enumerate(cases) for name in ([case] if number % 2 else [BASELINE, case])]
    rounds = [name for number in range(launches) for name in (once if number % 2 == 0 else [BASELINE, *once[:0:-1]])]
    return [*rounds, BASELINE]


def model_in(work: Path, shape: str) -> Path:
    """The random model, written once, with a tokenizer that has a text for each token that it may say."""
    folder = work / f"{shape}-model"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        sizes = SHAPES[shape]
        write_model(folder, sizes, sizes.layers_for(sizes.gigabytes), 4)
    return folder


def write_recipe(work: Path, model: Path, case: str, target: Mapping[str, Any], serve: Mapping[str, Any]) -> Path:
    """Write a recipe for the stages up to bench, with these settings of its target and of its server."""
    name = f"bench-{case}".replace("_", "-").replace("+", "-")
    recipe: dict[str, Any] = {
        "name": name,
        "source": {"folder": str(model.resolve())},
        "quantization": CASES[case],
        "target": {**target, "max_model_len": 1024},
        "evaluation": {"suite": "tiny"},
        "serve": dict(serve),
    }
    if "kv_cache" in CASES[case] or CASES[case]["scheme"] == "fp8":
        recipe["calibration"] = {"set": "tiny", "samples": 32, "sequence_length": 256}
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def series(
    work: Path, recipes: Mapping[str, Path], names: Sequence[str], ends: float | None, promise: float
) -> Iterator[dict[str, Any]]:
    """Launch after launch; after each what is known of all. What breaks a case is told, and the rest goes on."""
    reporter = reporter_for(json=False)
    jobs: dict[str, Job] = {}
    launches: dict[str, list[Launch]] = {BASELINE: []}
    broken: dict[str, str] = {}
    took: dict[str, float] = {}  # seconds of the last launch of each: a first one compiles
    warm = False
    for number, name in enumerate(names):
        if name in broken:
            continue
        if ends is not None and time.monotonic() + 1.1 * took.get(name, max(took.values(), default=0.0)) > ends:
            reporter.say(f"no time is left for launch {number + 1} of {len(names)}: {name}")
            break
        case = next(iter(recipes)) if name == BASELINE else name
        side: Side = "baseline" if name == BASELINE else "candidate"
        replicate = len(launches.setdefault(name, []))
        turn = Turn(side, number, replicate, work / "launches" / f"{number:02}-{name}")
        began = time.monotonic()
        try:
            if case not in jobs:
                jobs[case] = prepared(work, recipes[case], reporter)
            if not turn.finished:
                if not warm:
                    reporter.say("a launch of the baseline that does not count")
                    discarded_launch(jobs[case])
                    warm, began = True, time.monotonic()
                reporter.say(f"launch {number + 1} of {len(names)}: {name}")
                make_launch(jobs[case], turn, lambda _: None)
                took[name] = time.monotonic() - began
            launches[name].append(Launch.from_json(json.loads((turn.folder / LAUNCH).read_text(encoding="utf-8"))))
        except QuantmintError as error:
            broken[name] = str(error)
            reporter.warn(f"{name}: {error}")
        yield judged(jobs, launches, broken, promise)


def prepared(work: Path, recipe: Path, reporter: Reporter) -> Job:
    """A case's checkpoint, made by the stages, and what launches it."""
    setting = open_setting(str(recipe), store=Store(work / "store"), to_run=True)
    outcome = run_plan(needed(build_plan(setting), "quantize"), setting, reporter)
    inputs = {step.planned.key: step.entry for step in outcome.steps}
    return Job(setting, work, inputs, reporter, Servers(setting, reporter))


def judged(
    jobs: Mapping[str, Job], launches: Mapping[str, Sequence[Launch]], broken: Mapping[str, str], promise: float
) -> dict[str, Any]:
    """Every case against all launches of the baseline, and those against each other."""
    found: dict[str, Any] = {}
    for name, made in launches.items():
        before = launches[BASELINE]
        if name == BASELINE:  # every other one as a candidate
            before, made = before[::2], [replace(launch, side="candidate") for launch in before[1::2]]
        setting = next(iter(jobs.values())).setting if name == BASELINE else jobs[name].setting
        promised = Policy(margins={}, min_ratio=promise, hardware=setting.recipe.target.hardware)
        measured = measurements(setting, (*before, *made), "auto" if name == BASELINE else None)
        cells, faults = throughput.compare(measured, promised) if before and made else ([], [])
        # The gate's rules about launches, and not its whole judgement: nothing was asked, so there is no canary to
        # miss; and one order of all cases cannot be that of two sides.
        findings = [*(f for f in check_launches(measured) if f.subject != "launches"), *faults]
        findings += throughput.judge(cells, measured, promised, broken=False) if cells else []
        findings += [Finding.invalid(name, broken[name])] if name in broken else []
        found[name] = {
            "cells": [cell.to_json() for cell in cells],
            "findings": [finding.to_json() for finding in findings],
            "launches": [launch.to_json() for launch in made],
        }
    vllm = next((job.setting.vllm.version for job in jobs.values() if job.setting.vllm is not None), None)
    return {"vllm": vllm, "cases": found, "baseline": [launch.to_json() for launch in launches[BASELINE]]}


def needed(plan: tuple[Planned, ...], last: str) -> tuple[Planned, ...]:
    """The stages that one of them starts from, with itself, in the plan's order."""
    by_key = {planned.key: planned for planned in plan}
    wanted = {last}
    for planned in reversed(plan):
        if planned.key in wanted:
            wanted |= set(by_key[planned.key].inputs.values())
    return tuple(planned for planned in plan if planned.key in wanted)


def measurements(setting: Setting, launches: tuple[Launch, ...], kv_cache: str | None) -> Measurements:
    """Launches alone: what was served where is the same on both sides here."""
    assert setting.vllm is not None, "bench has run"
    here = local_device("cpu" if hardware(setting.recipe.target.hardware).kind == "cpu" else "cuda")
    cache = kv_cache or setting.recipe.quantization.kv_cache

    def server(kv_cache: str) -> Server:
        runtime = f"vllm {setting.vllm.version}" if setting.vllm else ""
        return Server(
            version=runtime,
            runtime=runtime,
            hardware=here.hardware,
            device=here.name,
            argv=("vllm", "serve", "--kv-cache-dtype", kv_cache),
            env={},
        )

    return Measurements(
        artefact="",
        structure=StructureCheck(Verdict.PASS),
        baseline=server("auto"),
        candidate=server(cache),
        launches=launches,
    )


def table(found: Mapping[str, Any]) -> str:
    """The figures for people."""
    machine = found["machine"]
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    lines = [f"{found['shape']} on {where}, vLLM {found['vllm']}; promise {found['promise']:g} x"]
    for case, result in found["cases"].items():
        for cell in result["cells"]:
            interval = f"[{cell['ratio_low']:.3f}, {cell['ratio_high']:.3f}]"
            before, after = cell["launches"]
            lines.append(
                f"  {case:<12} {cell['cell']:<20} {cell['baseline']:>9,.0f} -> {cell['candidate']:>9,.0f} tok/s  "
                f"{cell['ratio']:.3f} {interval}  p {cell['p_faster']:.3f}  launches: {before} and {after}"
            )
        lines += [f"    {finding['verdict']:<12} {finding['reason']}" for finding in result["findings"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
