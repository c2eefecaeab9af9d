"""The endpoint of speculative decoding with a real vLLM and a multi-token predictor: sound, and without its scales.

python -m tests.trap.predictor --hardware h100                # a tiny mixture with a predictor on a GPU of this host
python -m tests.trap.predictor --hardware h100 --dry-run      # the stages of both runs

Both are runs of a recipe, from its source to the stage that measures the candidate's acceptance; in the broken one that
stage is given a copy of the candidate in which the scales of the predictor are missing. The exit code is 1 where the
sound predictor does not PASS, after which nothing more is run, or the broken one neither FAILs nor is refused by name.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import yaml

from quantmint.eval.acceptance import AcceptancePolicy, compare, judge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import find_vllm
from quantmint.pipeline.stages import acceptance
from quantmint.pipeline.stages.canary import tokenized
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store
from tests.bench.throughput import needed
from tests.trap.mixture import PREDICTOR, build
from tests.zoo.models import read, write

EXPECTED = {"sound": Verdict.PASS, "broken": Verdict.FAIL}
MARGIN = 0.1
_PROMPTS = 8
_LAST = "acceptance-candidate"
_GPU = {"--enforce-eager": True, "--gpu-memory-utilization": 0.3}
_NAME = re.compile(rf"mtp|{re.escape(PREDICTOR)}", re.IGNORECASE)
"""What names the predictor in a refusal: vLLM's class for it, or its layer. Paths may have the word itself."""


def write_recipe(folder: Path, hardware: str, tokens: int) -> Path:
    """Write the model and its recipe in PTPC-FP8, the predictor too, below ``folder``; return the recipe's path."""
    # vLLM's CPU build has no experts in FP8 per channel: there the shared one alone is quantized.
    exclude = [r"re:.*\.experts\..*"] if hardware == "cpu" else []
    recipe = {
        "name": "predictor",
        "source": {"folder": str(build(folder / "model"))},
        "quantization": {"scheme": "ptpc_fp8", "mtp": "ptpc_fp8", "exclude": exclude},
        "target": {"hardware": hardware, "gpus": 1, "workload": "tiny", "max_model_len": 512},
        "evaluation": {"suite": "tiny"},
        "serve": {"knobs": {} if hardware == "cpu" else _GPU, "speculative": {"method": "mtp", "tokens": tokens}},
        "gate": {"acceptance": {"margin": MARGIN}, "throughput": {"min_ratio": None}},
    }
    path = folder / "predictor.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def without_scales(checkpoint: Path, folder: Path, modules: str = "") -> Path:
    """Copy a checkpoint to ``folder`` without the scales of its predictor, which stays declared; return ``folder``.

    Only the scales whose names ``modules`` matches, by search, are left out.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder)
    tensors = read(folder)
    pattern = re.compile(rf"(?=.*(?:{modules})){re.escape(PREDICTOR)}.*_scale")
    remaining = {name: tensor for name, tensor in tensors.items() if not pattern.fullmatch(name)}
    if len(remaining) == len(tensors):
        raise ValueError(f"{checkpoint}: found no scales below {PREDICTOR} that match {modules!r}")
    write(folder, remaining)
    return folder


def run(plan: tuple[Planned, ...], setting: Setting, broken: Path | None = None) -> Mapping[str, Entry]:
    """Run a plan with few prompts, and return the entries of its stages by key.

    The candidate's acceptance is measured anew, with ``broken`` that of the checkpoint in this folder.
    """

    def folder_of(entry: Entry) -> Path:
        return model_folder(entry) if broken is None or entry.stage != "quantize" else broken

    with (
        patch.object(acceptance, "tokenized", lambda *arguments: tokenized(*arguments)[:_PROMPTS]),
        patch.object(acceptance, "model_folder", folder_of),
    ):
        outcome = run_plan(plan, setting, PlainReporter(), redo=(_LAST,))
    return {step.planned.key: step.entry for step in outcome.steps}


def judged(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the verdict on both sides' acceptance, its reason, and the acceptance lengths."""
    compared = compare(acceptance.read_pairs(entries))
    decision, reason = judge(compared, AcceptancePolicy(MARGIN))
    return {
        "verdict": decision.value,
        "reason": reason,
        "baseline": round(compared.baseline, 3),
        "candidate": round(compared.candidate, 3),
    }


def verdict(
    folder: Path, name: str, hardware: str, *, tokens: int = 1, modules: str = "", dry_run: bool = False
) -> dict[str, Any]:
    """Return the stages of a run and, unless ``dry_run``, its verdict, reason, acceptance lengths and seconds.

    In the run that is named "broken" the predictor has no scales (only of those that ``modules`` matches). The runs
    share a store: the baseline is measured once, and the candidate's acceptance in each. A refusal that names the
    predictor is a FAIL.
    """
    began = time.monotonic()
    recipe, vllm = write_recipe(folder, hardware, tokens), find_vllm().executable
    setting = open_setting(str(recipe), store=Store(folder / "store"), vllm=str(vllm), to_run=True)
    plan = needed(build_plan(setting), _LAST)
    result: dict[str, Any] = {"run": name, "stages": [planned.key for planned in plan]}
    if dry_run:
        return result
    broken = None
    try:
        if name == "broken":
            checkpoint = model_folder(run(needed(plan, "quantize"), setting)["quantize"])
            broken = without_scales(checkpoint, folder / "without-scales", modules)
        result |= judged(run(plan, setting, broken))
    except QuantmintError as error:
        stopped = name == "broken" and _NAME.search(error.message) is not None
        result |= {"verdict": Verdict.FAIL.value if stopped else Verdict.INVALID.value, "reason": str(error)}
    return result | {"seconds": round(time.monotonic() - began, 1)}


@click.command()
@click.option("--hardware", required=True, help="Name of this machine's table, such as h100.")
@click.option("--tokens", default=1, show_default=True, help="Tokens that the predictor proposes at a time.")
@click.option("--modules", default="", metavar="REGEX", help="Leave out only scales with such a name, by search.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("trap-predictor"), show_default=True, help="Folder of both."
)
@click.option("--dry-run", is_flag=True, help="Print the stages and start nothing.")
def main(hardware: str, tokens: int, modules: str, work: Path, *, dry_run: bool) -> None:
    """Run the sound predictor and the broken one, and print a line of JSON for each."""
    work.mkdir(parents=True, exist_ok=True)
    for name, expected in EXPECTED.items():
        result = verdict(work.resolve(), name, hardware, tokens=tokens, modules=modules, dry_run=dry_run)
        click.echo(json.dumps(result))
        if not dry_run and result["verdict"] != expected.value:
            sys.exit(1)


if __name__ == "__main__":
    main()
