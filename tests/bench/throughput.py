"""How fast vLLM serves quantized checkpoints beside their 16-bit model: ratios with intervals, by fresh launches.

::

    python -m tests.bench.throughput --hardware h100 --case ptpc_fp8 --launches 4 --json h100.json --plot h100.svg
    python -m tests.bench.throughput --shape tiny --hardware cpu --workload tiny --launches 1

A Llama of random weights is written to ``--work``; then the pipeline's own stages quantize it, launch both sides by
turns and measure them, and the gate's own rule judges each cell against ``--promise``. The same command goes on after
an interruption. Random weights say nothing of accuracy, which is why nothing is asked, and of speed all there is:
nothing in these models depends on a value, and every answer has the length that the workload asks for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from eval.gate import throughput
from eval.gate.report import Policy
from eval.gate.validity import check_launches
from eval.measurements import Launch, Measurements, Server, Structure
from eval.verdict import Verdict
from pipeline.base.hardware import hardware
from pipeline.base.progress import reporter_for
from pipeline.serving.host.detect import device_here
from pipeline.stages.bench import read_launches
from pipeline.stages.planning import build_plan
from pipeline.stages.runner import run_plan
from pipeline.stages.session import open_setting
from pipeline.stages.stage import Planned, Setting
from pipeline.store.tree import Store
from tests.bench.model import SHAPES, describe, write_model

CASES: Mapping[str, dict[str, str]] = {
    "ptpc_fp8": {"scheme": "ptpc_fp8"},
    "ptpc_fp8+kv": {"scheme": "ptpc_fp8", "kv_cache": "fp8"},
    "fp8+kv": {"scheme": "fp8", "kv_cache": "fp8"},
    "mxfp4": {"scheme": "mxfp4"},
}
TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
WORKLOAD = Path(__file__).with_name("serving-8b.yaml")


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--hardware", required=True, help="Name of the table: what this machine is, and what the promise is for.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Default: ptpc_fp8 and fp8+kv.")
@click.option("--launches", default=4, show_default=True, help="Fresh launches a side.")
@click.option("--promise", default=1.1, show_default=True, help="Least ratio of output tokens/s.")
@click.option("--workload", default=str(WORKLOAD), show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("bench-throughput"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them here (SVG).")
def main(
    shape: str,
    hardware: str,
    cases: tuple[str, ...],
    launches: int,
    promise: float,
    workload: str,
    work: Path,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure, judge, print."""
    model = model_in(work, shape)
    found: dict[str, Any] = {
        "shape": shape,
        "hardware": hardware,
        "machine": describe("cpu" if hardware == "cpu" else "cuda:0"),
        "workload": Path(workload).stem,
        "promise": promise,
        "cases": {},
    }
    for case in cases or ("ptpc_fp8", "fp8+kv"):
        recipe = write_recipe(work, model, case, hardware=hardware, launches=launches, workload=workload)
        found["cases"][case] = measure(work, recipe, promise)
        found["vllm"] = found["cases"][case].pop("vllm")
        if json_file is not None:  # what is there is kept when the machine goes
            json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(table(found))
    if plot_file is not None:
        from tests.bench import plots

        plots.serving(found, plot_file)


def model_in(work: Path, shape: str) -> Path:
    """The random model, written once, with a tokenizer that puts random tokens into text and back."""
    folder = work / f"{shape}-model"
    if not (folder / "tokenizer.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        sizes = SHAPES[shape]
        write_model(folder, sizes, sizes.layers_for(sizes.gigabytes), 4)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def write_recipe(work: Path, model: Path, case: str, *, hardware: str, launches: int, workload: str) -> Path:
    """A recipe for the stages up to bench."""
    name = f"bench-{case}".replace("_", "-").replace("+", "-")
    recipe: dict[str, Any] = {
        "name": name,
        "source": {"folder": str(model.resolve())},
        "quantization": CASES[case],
        "target": {"hardware": hardware, "workload": workload, "max_model_len": 1024},
        "evaluation": {"suite": "tiny"},
        "gate": {"throughput": {"min_ratio": 1.0, "launches": launches}},
    }
    if "kv_cache" in CASES[case] or CASES[case]["scheme"] == "fp8":
        recipe["calibration"] = {"set": "tiny", "samples": 32, "sequence_length": 256}
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def measure(work: Path, recipe: Path, promise: float) -> dict[str, Any]:
    """Run what ``bench`` needs, and judge its launches by the gate's rule."""
    reporter = reporter_for(json=False)
    setting = open_setting(str(recipe), store=Store(work / "store"), to_run=True)
    outcome = run_plan(needed(build_plan(setting), "bench"), setting, reporter)
    entry = outcome.entry("bench")
    assert entry is not None, "the plan ends with bench"
    launches = read_launches(entry.path)
    promised = Policy(margins={}, min_ratio=promise, hardware=setting.recipe.target.hardware)
    measured = measurements(setting, launches)
    cells, faults = throughput.compare(measured, promised)
    # The gate's rules about launches, and not its whole judgement: nothing was asked, so there is no canary to miss.
    findings = [*check_launches(measured), *faults, *throughput.judge(cells, measured, promised, broken=False)]
    return {
        "vllm": setting.vllm.version if setting.vllm is not None else None,
        "cells": [cell.to_json() for cell in cells],
        "findings": [finding.to_json() for finding in findings],
        "launches": [launch.to_json() for launch in launches],
    }


def needed(plan: tuple[Planned, ...], last: str) -> tuple[Planned, ...]:
    """The stages that one of them starts from, with itself, in the plan's order."""
    by_key = {planned.key: planned for planned in plan}
    wanted = {last}
    for planned in reversed(plan):
        if planned.key in wanted:
            wanted |= set(by_key[planned.key].inputs.values())
    return tuple(planned for planned in plan if planned.key in wanted)


def measurements(setting: Setting, launches: tuple[Launch, ...]) -> Measurements:
    """Launches alone: what was served where is the same on both sides here."""
    assert setting.vllm is not None, "bench has run"
    here = device_here("cpu" if hardware(setting.recipe.target.hardware).kind == "cpu" else "cuda")
    cache = setting.recipe.quantization.kv_cache

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
        structure=Structure(Verdict.PASS),
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
            lines.append(
                f"  {case:<12} {cell['cell']:<20} {cell['baseline']:>9,.0f} -> {cell['candidate']:>9,.0f} tok/s  "
                f"{cell['ratio']:.3f} {interval}  p {cell['p_faster']:.3f}  {cell['launches'][0]} launches a side"
            )
        lines += [f"    {finding['verdict']:<12} {finding['reason']}" for finding in result["findings"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
