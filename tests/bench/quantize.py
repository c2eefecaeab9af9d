"""How fast the stream engine is beside `cp`, llm-compressor and Quark, and in how much memory.

::

    python -m tests.bench.quantize --size 0.5 --rounds 1 --only ptpc_fp8 --contenders cp,quantmint
    python -m tests.bench.quantize --shape 8b --device cuda:0 --json h100.json --plot h100.svg

A Llama of random weights is written to a temporary folder. Then each contender turns it into a checkpoint, in a process
of its own, with the source in the page cache, and in turns that start with another contender each round, so that a
machine that grows slower harms none of them. What is not installed is reported as absent. Goals are printed beside the
figures; reaching them decides nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline.stages.cost import Machine, machine_here
from tests.bench import figures
from tests.bench.contenders import BATCH, CASES, CONTENDERS, Task, absent, how
from tests.bench.model import SHAPES, describe, into_page_cache, write_model

ROOT = Path(__file__).parents[2]
_WARM_VOCABULARY = 1024


class Bench:
    """One model, and what every contender made of it."""

    def __init__(self, folder: Path, shape: str, gigabytes: float, shards: int) -> None:
        self.folder, self.source, self.warm = folder, folder / "source", folder / "warm"
        self.layers = SHAPES[shape].layers_for(gigabytes)
        self.shape, self.shards = shape, shards
        self.nbytes = write_model(self.source, SHAPES[shape], self.layers, shards)
        write_model(self.warm, SHAPES[shape], 1, 1, vocabulary=_WARM_VOCABULARY)

    def doubled(self) -> Path:
        """The same model with twice the layers, in files of the same size."""
        folder = self.folder / "doubled"
        if not folder.is_dir():
            write_model(folder, SHAPES[self.shape], 2 * self.layers, 2 * self.shards)
        return folder

    def measure(self, contender: str, task: Task, source: Path) -> dict[str, Any]:
        """Run a contender once in its own process; what it printed where it fails, as ``why_not``."""
        destination, order, result, log = (self.folder / f"{contender}{end}" for end in ("", ".order", ".json", ".log"))
        for stale in (destination, destination.with_name(f"{destination.name}-warm")):
            shutil.rmtree(stale, ignore_errors=True)
        given = {"contender": contender, "task": asdict(task), "source": str(source), "destination": str(destination)}
        order.write_text(json.dumps({**given, "warm": None if contender == "cp" else str(self.warm)}))
        result.unlink(missing_ok=True)
        os.sync()
        into_page_cache(source)
        with log.open("w") as stream:
            code = subprocess.run(
                [sys.executable, "-m", "tests.bench.child", str(order), str(result)],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            click.echo("\n".join([f"{contender} {task.case}: exit {code}", *lines[-20:]]), err=True)
            return {"why_not": f"failed: {lines[-1] if lines else f'exit {code}'}"}
        found: dict[str, Any] = json.loads(result.read_text())
        click.echo(f"{task.case:<10} {contender:<15} written {found['written']:.2f} s", err=True)
        return found

    def case(self, task: Task, contenders: list[str], rounds: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """All contenders of one case, in turns: their rows, and how many of our tensors equal llm-compressor's."""
        rows: dict[str, Any] = {}
        for contender in contenders:
            name = contender if contender == "quantmint" else f"{contender}: {how(contender, task.case)}"
            rows[contender] = {"name": "cp -r" if contender == "cp" else name, "runs": []}
            if how(contender, task.case) is None:
                del rows[contender]
            elif absent(contender):
                rows[contender] |= {"why_not": "absent: not installed here"}
        same: dict[str, Any] | None = None
        running = [contender for contender, row in rows.items() if figures.measured(row)]
        for number in range(rounds):
            turn = number % len(running) if running else 0
            for contender in running[turn:] + running[:turn]:
                if not figures.measured(rows[contender]):
                    continue
                found = self.measure(contender, task, self.source)
                if "why_not" in found:
                    rows[contender] |= found
                else:
                    rows[contender]["runs"].append(found)
            if number == 0 and all(figures.measured(rows.get(name)) for name in ("quantmint", "llm-compressor")):
                same = _same_tensors(self.folder / "quantmint", self.folder / "llm-compressor")
        for row in rows.values():
            if figures.measured(row):
                row |= figures.summary(row["runs"])
        return rows, same


def predict(task: Task, source: Path, machine: Machine) -> dict[str, float]:
    """What `quantmint plan` would say of a case: seconds until written and durable, and resident bytes."""
    from pipeline.quantize.engines.stream.plan import plan_shards
    from pipeline.quantize.formats.checkpoint import open_checkpoint
    from pipeline.quantize.formats.layout import Choice
    from pipeline.quantize.model.structure import read_structure
    from pipeline.recipe.schema import Calibration
    from pipeline.stages.cost import calibrate_cost, calibrate_volume, quantize_cost, quantize_volume

    checkpoint = open_checkpoint(source)
    structure = read_structure(source, checkpoint.tensors)
    scheme = "fp8" if task.calibrated else task.case
    choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, task.calibrated)
    costs = [quantize_cost(quantize_volume(plan_shards(checkpoint, structure, choice, "compressed-tensors")), machine)]
    if task.calibrated:
        sizes = {"samples": task.samples, "sequence_length": task.length, "batch_size": BATCH}
        section = Calibration(set="tiny", mode=task.mode, **sizes)
        costs.insert(0, calibrate_cost(calibrate_volume(checkpoint, structure, section), machine))
    return {
        "written": sum(cost.seconds for cost in costs[:-1]) + costs[-1].written,
        "durable": sum(cost.seconds for cost in costs),
        "memory": max(cost.memory for cost in costs),
    }


def _same_tensors(one: Path, other: Path) -> dict[str, Any]:
    """How many tensors of two checkpoints are the same, bit for bit, in whatever files."""
    import torch

    from pipeline.quantize.formats.checkpoint import Reader, open_checkpoint

    left, right = open_checkpoint(one), open_checkpoint(other)
    read_left, read_right = Reader(left), Reader(right)

    def equal(name: str) -> bool:
        values = [read(name).reshape(-1).view(torch.uint8) for read in (read_left, read_right)]
        return torch.equal(*values)

    names = left.tensors.keys() | right.tensors.keys()
    same = sum(name in left.tensors and name in right.tensors and equal(name) for name in names)
    return {"same": same, "of": len(names), "than": other.name}


def _listed(known: Any, value: str | None, option: str) -> list[str]:
    chosen = list(known) if value is None else value.split(",")
    for name in chosen:
        if name not in known:
            raise click.BadParameter(f"found {name!r}, expected some of {', '.join(known)}", param_hint=option)
    return chosen


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="2gb", show_default=True, help="The model's shape.")
@click.option("--size", type=float, help="Its size in GB, by the number of layers (default: the shape's own).")
@click.option("--shards", default=4, show_default=True, help="Files that it comes in.")
@click.option("--rounds", default=3, show_default=True, help="How often each contender runs.")
@click.option("--only", help=f"Cases, with commas between them: {', '.join(CASES)} (default: all).")
@click.option("--contenders", help=f"Some of {', '.join(CONTENDERS)} (default: all).")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda:0.")
@click.option("--samples", type=int, help="Calibration blocks (default: 64 on a GPU, 16 on a CPU).")
@click.option("--length", type=int, help="Tokens of a calibration block (default: 1024 on a GPU, 128 on a CPU).")
@click.option("--mode", type=click.Choice(["auto", "resident", "layer"]), default="auto", help="How ours calibrates.")
@click.option("--double", is_flag=True, help="Run ours on twice the layers too, for its memory.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; five times the size must be free.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it there: .svg or .png.")
@click.option("--keep", is_flag=True, help="Keep the models that were made, and say where.")
def main(
    shape: str,
    size: float | None,
    shards: int,
    rounds: int,
    only: str | None,
    contenders: str | None,
    device: str,
    samples: int | None,
    length: int | None,
    mode: str,
    double: bool,
    folder: Path | None,
    json_path: Path | None,
    plot: Path | None,
    keep: bool,
) -> None:
    """Compare the stream engine with cp, llm-compressor and Quark."""
    cases, chosen = _listed(CASES, only, "--only"), _listed(CONTENDERS, contenders, "--contenders")
    work = Path(tempfile.mkdtemp(prefix="quantmint-bench-", dir=folder))
    gpu = device != "cpu"
    samples, length = samples or (64 if gpu else 16), length or (1024 if gpu else 128)
    try:
        machine = describe(device)
        bench = Bench(work, shape, size or SHAPES[shape].gigabytes, shards)
        result: dict[str, Any] = {
            "machine": machine,
            "device": device,
            "shape": shape,
            "model_gb": bench.nbytes / 1e9,
            "layers": bench.layers,
            "shards": shards,
            "rounds": rounds,
            "samples": samples,
            "length": length,
            "mode": mode,
            "cases": {},
            "same_bytes": {},
            "doubled": {},
            "predicted": {},
        }
        rates, _ = machine_here(device)
        result["rates"] = asdict(rates.rates)
        for case in cases:
            task = Task(case, device, samples, length, mode)
            result["cases"][case], result["same_bytes"][case] = bench.case(task, chosen, rounds)
            result["predicted"][case] = predict(task, bench.source, rates)
            if double and "quantmint" in chosen:
                found = bench.measure("quantmint", task, bench.doubled())
                result["doubled"][case] = {key: found[key] for key in ("written", "peak_rss")}
        result["goals"] = figures.judge(result)
        click.echo(figures.table(result))
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            from tests.bench import plots

            plots.quantizing(result, plot)
    finally:
        if keep:
            click.echo(f"kept in {work}", err=True)
        else:
            shutil.rmtree(work, ignore_errors=True)
    failed = [row for rows in result["cases"].values() for row in rows.values() if "failed" in row.get("why_not", "")]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
