"""The layout's endpoint with a real vLLM at TP 2 on two GPUs: a sound launch, and one with a transposed shard.

python -m tests.trap.tensor_parallel --hardware h100                # the embedded model on two GPUs of this host
python -m tests.trap.tensor_parallel --hardware h100 --dry-run      # the stages of both runs

Both are runs of a recipe, from its source to the stage that compares the layouts; `tests/trap/layouts.py` does the same
on a CPU, for which no plan has two processes. The exit code is 1 where the sound launch does not PASS or the broken one
does not FAIL.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import yaml

from quantmint.eval.layout import LayoutPolicy, compare, judge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.recipe.sections import LayoutGate
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import find_vllm
from quantmint.pipeline.stages.layout import read_layout
from quantmint.pipeline.store.tree import Store
from tests.bench.throughput import needed
from tests.trap.shard import wrap

EXPECTED = {"sound": Verdict.PASS, "broken": Verdict.FAIL}
_MEMORY = ["--kv-cache-memory-bytes", str(4 << 30)]
"""Of a launch: the single one starts beside the one on two GPUs, so vLLM must not measure what is free."""


def write_recipe(folder: Path, name: str, hardware: str) -> Path:
    """Write the recipe of the embedded model at TP 2 in PTPC-FP8 below ``folder``, and return its path."""
    recipe = {
        "name": f"tp2-{name}",
        "extends": "tiny-ptpc-fp8kv",
        "quantization": {"kv_cache": "auto"},
        "target": {"hardware": hardware, "gpus": 2},
        "serve": {
            "knobs": {"--tensor-parallel-size": 2, "--enforce-eager": True, "--gpu-memory-utilization": 0.2},
            "arguments": _MEMORY,
        },
        "gate": {"layout": {}, "throughput": {"min_ratio": None}},
    }
    path = folder / f"tp2-{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def verdict(folder: Path, name: str, hardware: str, *, dry_run: bool) -> dict[str, object]:
    """Return the stages of a run and, unless ``dry_run``, its verdict, reason and seconds.

    In the run that is named "broken" a shard of rank 1 is transposed.
    """
    began = time.monotonic()
    vllm = find_vllm().executable
    command = wrap(vllm, folder / "shard") if name == "broken" else vllm
    recipe = write_recipe(folder, name, hardware)
    setting = open_setting(str(recipe), store=Store(folder / name), vllm=str(command), to_run=True)
    plan = needed(build_plan(setting), "layout")
    result: dict[str, object] = {"run": name, "stages": [planned.key for planned in plan]}
    if dry_run:
        return result
    outcome = run_plan(plan, setting, PlainReporter())
    entry = next(step.entry for step in outcome.steps if step.planned.key == "layout")
    decision, reason = judge(compare(read_layout(entry.path)), LayoutPolicy(LayoutGate().max))
    return result | {"verdict": decision.value, "reason": reason, "seconds": round(time.monotonic() - began, 1)}


@click.command()
@click.option("--hardware", required=True, help="Name of this machine's table, such as h100.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("trap-tp2"), show_default=True, help="Folder of both runs."
)
@click.option("--dry-run", is_flag=True, help="Print the stages and start nothing.")
def main(hardware: str, work: Path, *, dry_run: bool) -> None:
    """Run both, and print a line of JSON for each."""
    work.mkdir(parents=True, exist_ok=True)
    results = {name: verdict(work.resolve(), name, hardware, dry_run=dry_run) for name in EXPECTED}
    for result in results.values():
        click.echo(json.dumps(result))
    if not dry_run and any(results[name]["verdict"] != expected.value for name, expected in EXPECTED.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
