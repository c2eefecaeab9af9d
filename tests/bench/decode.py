"""How long sources that are quantized already take to another format, beside `cp` and Quark's file to file.

::

    python -m tests.bench.decode --shape 2gb --rounds 3 --json docs/bench-decode.json

A Llama of random weights is written in INT4 (groups of 128) and in MXFP4. Each contender is timed as a whole process,
by turns, with the source in the page cache; what fails, or is not installed, is reported with its last line.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import click

from tests.bench import contenders
from tests.bench.contenders import Task
from tests.bench.model import SHAPES, describe, into_page_cache, write_model

ROOT = Path(__file__).parents[2]
_CHILD = Path(__file__).with_name("child.py")
CASES = {"INT4 to MXFP4": ("w4a16", "mxfp4"), "MXFP4 to FP8 by channel": ("mxfp4", "ptpc_fp8")}
"""Scheme of the source, and scheme of what is made of it."""
CONTENDERS = ("cp", "quantmint", "quark")


def timed(contender: str, scheme: str, source: Path, folder: Path) -> dict[str, Any]:
    """Run a contender once; return its seconds, processor seconds and peak bytes, or ``why_not`` where it failed."""
    out = folder / "out"
    task = Task(scheme, "cpu", folder / "words.txt", 1, 1)
    into_page_cache(source)
    order = [sys.executable, "-I", str(_CHILD), f"{out}.stdout", f"{out}.stderr"]
    order += contenders.command(contender, task, source, out)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    answer = subprocess.run(order, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    run: dict[str, Any] = json.loads(answer)
    nbytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    shutil.rmtree(out, ignore_errors=True)
    if run["code"] or not nbytes:
        lines = [line for line in Path(f"{out}.stderr").read_text(errors="replace").splitlines() if line.strip()]
        return {"why_not": lines[-1] if lines else f"it wrote no weights, and ended with {run['code']}"}
    return {"wall": run["ended"] - run["begun"], "cpu": run["cpu"], "rss": run["rss"], "made_gb": nbytes / 1e9}


def write_sources(folder: Path, shape: str) -> dict[str, Path]:
    """Write a model in 16 bit, and of it one in each source scheme of `CASES`; return their folders by scheme."""
    from quantmint.pipeline.commands.quantize import quantize

    plain = folder / "plain"
    write_model(plain, SHAPES[shape], SHAPES[shape].layers_for(SHAPES[shape].gigabytes), 4)
    sources = {scheme: folder / scheme for scheme, _ in CASES.values()}
    for scheme, source in sources.items():
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            quantize.main([str(plain), str(source), "--scheme", scheme], standalone_mode=False)
        shutil.rmtree(source / ".quantmint", ignore_errors=True)
        shutil.rmtree(source / "quantmint", ignore_errors=True)
    shutil.rmtree(plain)
    return sources


def table(result: dict[str, Any]) -> str:
    """Return the medians as a table: seconds, and of how many rounds."""
    lines = ["| | seconds | processor seconds | memory, GB | source, GB |", "|---|--:|--:|--:|--:|"]
    for case in CASES:
        for contender in CONTENDERS:
            runs = [run for run in result["runs"] if (run["case"], run["contender"]) == (case, contender)]
            good = [run for run in runs if "wall" in run]
            name = f"{case}: {contender}"
            if good:
                wall, cpu, rss = (median(run[key] for run in good) for key in ("wall", "cpu", "rss"))
                lines.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {rss / 1e9:.2f} | {result['source_gb'][case]:.2f} |")
            elif runs:
                lines.append(f"| {name} | {runs[0]['why_not']} | | | |")
    return "\n".join(lines)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="2gb", show_default=True, help="The model's shape.")
@click.option("--rounds", default=3, show_default=True, help="How often each contender runs.")
@click.option("--contenders", "names", default=",".join(CONTENDERS), show_default=True, help="Some of them.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; 2.5 times the size must be free.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
def main(shape: str, rounds: int, names: str, folder: Path | None, json_path: Path | None) -> None:
    """Convert quantized sources with `quantmint quantize`, `cp` and Quark, each as a whole process."""
    work = Path(tempfile.mkdtemp(prefix="quantmint-decode-", dir=folder))
    try:
        sources = write_sources(work, shape)
        nbytes = {
            case: sum(path.stat().st_size for path in sources[scheme].glob("*.safetensors")) / 1e9
            for case, (scheme, _) in CASES.items()
        }
        result: dict[str, Any] = {"machine": describe("cpu"), "shape": shape, "source_gb": nbytes, "runs": []}
        chosen = [name for name in CONTENDERS if name in names.split(",") and not contenders.absent(name)]
        for number in range(rounds):
            turn = number % len(chosen)
            for case, (scheme, target) in CASES.items():
                for contender in chosen[turn:] + chosen[:turn]:
                    run = timed(contender, target, sources[scheme], work)
                    result["runs"].append({"case": case, "contender": contender, **run})
                    click.echo(f"{case}: {contender}: {run.get('why_not') or format(run['wall'], '.1f') + ' s'}")
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        click.echo(f"\n{table(result)}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
