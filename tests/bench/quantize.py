"""How long `quantmint quantize` takes beside `cp`, llm-compressor and Quark, and in how much memory: whole processes.

::

    python -m tests.bench.quantize --shape 270m --rounds 1 --only ptpc_fp8 --contenders cp,quantmint
    python -m tests.bench.quantize --shape 8b --device cuda:0 --json h100.json --plot h100.svg
    python -m tests.bench.quantize --only mxfp4 --contenders quantmint --beside 8
    python -m tests.bench.quantize --shape 8b --device cuda:0 --only mxfp4_gptq --contenders quantmint --gpu-memory 24

A Llama of random weights is written to a temporary folder. Then each contender's command line makes a checkpoint of it
and is timed from its start to its exit, with the source in the page cache, and in turns that start with another
contender each round, so that a machine that grows slower harms none of them. What is not installed is reported as
absent. What was measured is printed, and written with --json, at once. Goals are printed beside the figures; reaching
them decides nothing.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tests.bench import contenders, figures
from tests.bench.contenders import ALGORITHMS, BASELINES, CASES, FIRST, OURS, PEERS, Task
from tests.bench.disk import disk_limit, flush
from tests.bench.model import SHAPES, VOCABULARY, describe, into_page_cache, write_model

ROOT = Path(__file__).parents[2]
_CHILD = Path(__file__).with_name("child.py")
_EVERYBODY = (*BASELINES, *OURS, *PEERS)
_USUAL = tuple(name for name in _EVERYBODY if name != "quantmint-unproven")


class Bench:
    """One model, and everything that was measured with it, in ``result``, which is written after each measurement."""

    def __init__(self, folder: Path, result: dict[str, Any], json_path: Path | None) -> None:
        self.folder, self.source, self.result, self.json_path = folder, folder / "source", result, json_path
        shape = SHAPES[result["shape"]]
        layers = shape.layers_for(result["model_gb"])
        result["model_gb"] = write_model(self.source, shape, layers, result["shards"]) / 1e9
        self.words = write_words(folder, result["samples"], result["length"])

    def task(self, case: str) -> Task:
        result = self.result
        return Task(case, result["device"], self.words, result["samples"], result["length"], result["gpu_memory"])

    def prepare(self, chosen: list[str]) -> None:
        """Bring what is started into the state of a machine that it was started on before: compiled, in the page cache,
        and for ours with the model's structure known."""
        for name in ("pipeline", "calibration", "eval"):
            compileall.compile_dir(ROOT / name, quiet=2)
        ours = contenders.command("quantmint", self.task("ptpc_fp8"), self.source, self.folder / "none")
        orders = [[*ours, "--dry-run"]] if any(name in OURS for name in chosen) else []
        peers = [PEERS[name] for name in chosen if name in PEERS and not contenders.absent(name)]
        # A plan of ours imports what the baselines import.
        usual = [] if orders else ["transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama"]
        imports = (*usual, *peers)
        orders += [[sys.executable, "-c", f"import {names}"] for names in imports]
        for order in orders:
            environment = self._environment("quantmint")
            subprocess.run(order, cwd=ROOT, env=environment, capture_output=True, check=False)

    def _environment(self, contender: str) -> dict[str, str]:
        cache = self.folder / ("cache-first" if contender == FIRST else "cache")
        if contender == FIRST:
            shutil.rmtree(cache, ignore_errors=True)
        usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return usual | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}

    def measure(self, contender: str, task: Task, count: int = 1) -> list[dict[str, Any]]:
        """Run a contender once, or as often beside itself as ``count`` says, each in its own process: what each took,
        or ``why_not`` where it failed."""
        outs = [self.folder / f"out-{number}" for number in range(count)]
        environment = self._environment(contender)
        os.sync()
        into_page_cache(self.source)
        started = []
        for out in outs:
            order = contenders.command(contender, task, self.source, out)
            child = [sys.executable, "-I", str(_CHILD), f"{out}.stdout", f"{out}.stderr", *order]
            started.append(subprocess.Popen(child, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        answers = [child.communicate()[0] for child in started]
        runs = []
        for out, answer in zip(outs, answers, strict=True):
            run = json.loads(answer)
            if run.pop("code"):
                why = [line for line in Path(f"{out}.stderr").read_text(errors="replace").splitlines() if line.strip()]
                click.echo("\n".join(why[-20:]), err=True)
                runs.append({"why_not": f"failed: {why[-1] if why else 'no word'}"})
                continue
            run["wall"] = run["ended"] - run["begun"]
            run["seconds"] = _seconds_told(Path(f"{out}.stdout"))
            if taken := re.search(r"GPU memory: ([\d.]+) GB", Path(f"{out}.stderr").read_text(errors="replace")):
                run["gpu_gb"] = float(taken[1])
            if out.is_dir():
                run["later"] = flush(out)
                run["made_gb"] = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e9
            runs.append(run)
        for out in outs:
            shutil.rmtree(out, ignore_errors=True)
        return runs

    def keep(self, part: str, found: dict[str, Any]) -> None:
        """Add a measurement to a part of the result, print it, and write the result."""
        self.result[part].append(found)
        click.echo(figures.line(part, found))
        if self.json_path is not None:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def round(self, number: int, cases: list[str], chosen: list[str]) -> None:
        """What the disk takes, then all contenders, each of them first in some round."""
        self.keep("disk", disk_limit(self.folder, round(self.result["model_gb"] * 5e8)))
        for case in ("", *cases):
            those = [name for name in chosen if (name in BASELINES) == (not case)]
            those = [name for name in those if contenders.takes_part(name, case)]
            turn = number % max(1, len(those))
            for name in those[turn:] + those[:turn]:
                known = {"case": case, "contender": name, "title": contenders.title(name, case)}
                if contenders.absent(name):
                    if number == 0:
                        self.keep("runs", known | {"why_not": "absent: not installed here"})
                    continue
                self.keep("runs", known | self.measure(name, self.task(case))[0])

    def crowd(self, count: int, case: str) -> None:
        """One of ours alone, and then as many beside each other."""
        alone = self.measure("quantmint", self.task(case))[0]
        runs = self.measure("quantmint", self.task(case), count)
        found: dict[str, Any] = {"case": case, "count": count}
        if why := next((run["why_not"] for run in [alone, *runs] if "why_not" in run), None):
            self.keep("beside", found | {"why_not": why})
            return
        wall = max(run["ended"] for run in runs) - min(run["begun"] for run in runs)
        cpu, rss = sum(run["cpu"] for run in runs), max(run["rss"] for run in runs)
        each = [run["wall"] for run in runs]
        self.keep("beside", found | {"alone": alone["wall"], "wall": wall, "each": each, "cpu": cpu, "rss": rss})


def _seconds_told(stdout: Path) -> dict[str, float]:
    """What a command said of its parts: the JSON object at the end of what it printed, if there is one."""
    text = "\n" + stdout.read_text(errors="replace")
    try:
        return dict(json.loads(text[text.rindex("\n{") :])["seconds"])
    except (ValueError, KeyError):
        return {}


def write_words(folder: Path, samples: int, length: int) -> Path:
    """A calibration text of random words, a sample a line, and the calibration set that names it, beside it."""
    words = folder / "words.txt"
    drawn = [
        f"w{3 + number * 40_503 % 65_521 % (VOCABULARY - 3)}" for number in range(samples * length)
    ]  # w0 to w2: special
    words.write_text("".join(" ".join(drawn[at : at + length]) + "\n" for at in range(0, len(drawn), length)))
    words.with_suffix(".yaml").write_text(f"name: words\ndescription: random words\nfile: {words.name}\ntext: text\n")
    return words


def _listed(known: Any, value: str | None, option: str, default: Any = None) -> list[str]:
    chosen = list(default or known) if value is None else value.split(",")
    for name in chosen:
        if name not in known:
            raise click.BadParameter(f"found {name!r}, expected some of {', '.join(known)}", param_hint=option)
    return chosen


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="2gb", show_default=True, help="The model's shape.")
@click.option("--size", type=float, help="Its size in GB, by the number of layers (default: the shape's own).")
@click.option("--shards", default=4, show_default=True, help="Files that it comes in.")
@click.option("--rounds", default=3, show_default=True, help="How often each contender runs.")
@click.option("--only", help=f"Cases, with commas between them: {', '.join(CASES)} (default: all but the last two).")
@click.option("--contenders", "names", help=f"Some of {', '.join(_EVERYBODY)} (default: all but the unproven).")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda:0, or auto, every GPU: ours alone.")
@click.option("--samples", type=int, help="Calibration samples (default: 64 on a GPU, 32 on a CPU).")
@click.option("--length", type=int, help="Tokens of a sample (default: 1024 on a GPU, 128 on a CPU).")
@click.option("--gpu-memory", type=float, help="GB of the GPU that ours may take (default: all of it).")
@click.option("--beside", type=int, help="Also run as many of ours at once, of the first case.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; 2.5 times the size must be free.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it there: .svg or .png.")
def main(
    shape: str,
    size: float | None,
    shards: int,
    rounds: int,
    only: str | None,
    names: str | None,
    device: str,
    samples: int | None,
    length: int | None,
    gpu_memory: float | None,
    beside: int | None,
    folder: Path | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Compare `quantmint quantize` with cp, llm-compressor and Quark, each as a whole process."""
    cases = _listed(CASES, only, "--only", [case for case in CASES if case not in ALGORITHMS])
    chosen = _listed(_EVERYBODY, names, "--contenders", _USUAL)
    work, gpu = Path(tempfile.mkdtemp(prefix="quantmint-bench-", dir=folder)), device != "cpu"
    result: dict[str, Any] = {
        "machine": describe(device),
        "device": device,
        "shape": shape,
        "model_gb": size or SHAPES[shape].gigabytes,
        "shards": shards,
        "samples": samples or (64 if gpu else 32),
        "length": length or (1024 if gpu else 128),
        "gpu_memory": gpu_memory,
        "disk": [],
        "runs": [],
        "beside": [],
    }
    try:
        bench = Bench(work, result, json_path)
        bench.prepare(chosen)
        for number in range(rounds):
            bench.round(number, cases, chosen)
        if beside:
            bench.crowd(beside, cases[0])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    click.echo(f"\n{figures.table(result)}")
    if plot is not None:
        from tests.bench import plots

        plots.quantizing(result, plot)
    sys.exit(1 if any("failed" in run.get("why_not", "") for run in result["runs"] + result["beside"]) else 0)


if __name__ == "__main__":
    main()
