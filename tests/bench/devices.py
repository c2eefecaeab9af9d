"""Measure `quantmint quantize` on one, two and more GPUs of a host: seconds, memory, and whether the bytes are equal.

::

    python -m tests.bench.devices --shape 8b --counts 1,2,4 --samples 128 --length 2048 --json devices.json
    python -m tests.bench.devices --shape 70b --counts 4 --folder /data
    python -m tests.bench.devices --shape r1 --layers 2 --counts 1,2,4
    python -m tests.bench.devices --shape 70b --scheme fp8 --kv-cache fp8 --counts 4 --ray 2,4

A model of random weights is written once. For each count the command sees so many GPUs (CUDA_VISIBLE_DEVICES) and is
timed as a whole process, with the source in the page cache; ``--ray`` runs it on a Ray of this host whose single node
has so many GPUs. The forecast is that of `quantmint quantize --dry-run` with the same GPUs, in seconds. Checkpoints of
one case are compared by the SHA-256 of their weight files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import torch

from tests.bench import deepseek
from tests.bench.deepseek import watching_gpus
from tests.bench.model import SHAPES, describe, into_page_cache, write_model
from tests.bench.quantize import write_words

ROOT = Path(__file__).parents[2]
_CHILD = Path(__file__).with_name("child.py")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def write_source(folder: Path, shape: str, layers: int | None) -> int:
    """Write a model of a shape, ``layers`` of it where they are given; return the bytes of its tensors."""
    if shape == "r1":
        return deepseek.write_source(folder, deepseek.Shape(layers or 2, dense=0, experts=256, narrow=False))
    llama = SHAPES[shape]
    return write_model(folder, llama, layers or llama.layers_for(llama.gigabytes), shards=16)


@contextmanager
def visible(count: int, *, ray: bool) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a command that sees ``count`` GPUs, or a Ray node that has them."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
    if not ray:
        yield environment
        return
    environment |= {**_QUIET, "RAY_ADDRESS": "127.0.0.1:6379"}
    gpus = min(count, torch.cuda.device_count())
    start = ["start", "--head", "--port=6379", f"--num-gpus={gpus}", "--include-dashboard=false"]
    program = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*program, *start], env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        yield environment
    finally:
        subprocess.run([*program, "stop", "--force"], env=environment, check=False, stdout=subprocess.DEVNULL)


def measure(options: list[str], source: Path, out: Path, count: int, *, ray: bool) -> dict[str, Any]:
    """Run the command; return its seconds, bytes, forecast and digest, or ``why_not`` with the end of its errors."""
    row: dict[str, Any] = {"gpus": count, "on": "ray" if ray else "one process"}
    command = [sys.executable, "-m", "quantmint", "quantize", str(source), str(out), *options, "--json"]
    logs = [f"{out}.stdout", f"{out}.stderr"]
    with visible(count, ray=ray) as environment:
        dry = subprocess.run([*command, "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True)
        if dry.returncode == 0:
            stages = json.loads(dry.stdout)["costs"]["stages"]
            row["forecasts"] = {name: stage["seconds"] for name, stage in stages.items()}
            row["forecast"] = sum(row["forecasts"].values())
        into_page_cache(source)
        child = [sys.executable, "-I", str(_CHILD), *logs, *command, *(["--on", "ray"] if ray else [])]
        with watching_gpus(row):
            row |= json.loads(subprocess.run(child, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
    if row.pop("code"):
        lines = Path(logs[1]).read_text(errors="replace").splitlines()
        row["why_not"] = "\n".join([line for line in lines if not line.startswith("frame #")][-20:])
        return row
    row["wall"] = row.pop("ended") - row.pop("begun")
    text = "\n" + Path(logs[0]).read_text(errors="replace")
    row["seconds"] = json.loads(text[text.rindex("\n{") :])["seconds"]
    digest = sha256()
    for path in sorted(out.glob("*.safetensors")):
        with path.open("rb") as stream:
            while piece := stream.read(1 << 24):
                digest.update(piece)
    row["sha256"] = digest.hexdigest()
    return row


def line(row: Mapping[str, Any]) -> str:
    """Word a measurement."""
    title = f"{row['gpus']} GPUs, {row['on']}"
    if "why_not" in row:
        return f"{title}: failed\n{row['why_not']}"
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in row.get("forecasts", {}).items())
    forecast = f"{row['forecast']:.0f} s: {stages}" if stages else "none"
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in row["seconds"].items())
    return (
        f"{title}: {row['wall']:.1f} s (forecast {forecast}), CPU {row['cpu']:.0f} s, host {row['rss'] / 1e9:.1f} GB, "
        f"GPUs {row.get('gpu_gb', 0.0):.1f} GB; {parts}; sha256 {row['sha256'][:12]}"
    )


@click.command()
@click.option(
    "--shape", type=click.Choice([*SHAPES, "r1"]), default="8b", show_default=True, help="Shape of the model."
)
@click.option("--layers", type=int, help="Number of layers (default: the shape's own; of r1 two, all mixtures).")
@click.option("--scheme", default="mxfp4", show_default=True, help="Quantize to that scheme.")
@click.option("--gptq/--no-gptq", default=True, show_default=True, help="Quantize by GPTQ.")
@click.option("--kv-cache", default="auto", show_default=True, help="Cache: auto, or fp8 with calibrated scales.")
@click.option("--counts", default="1,2,4", show_default=True, help="Numbers of GPUs, with commas between them.")
@click.option("--ray", "ray_counts", default="", help="Numbers of GPUs of a Ray node, with commas between them.")
@click.option("--samples", default=128, show_default=True, help="Calibration samples.")
@click.option("--length", default=2048, show_default=True, help="Tokens of a sample.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work: the model and a checkpoint of it.")
@click.option("--source", type=click.Path(path_type=Path), help="Take the model from there, or write it there.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
def main(
    shape: str,
    layers: int | None,
    scheme: str,
    gptq: bool,
    kv_cache: str,
    counts: str,
    ray_counts: str,
    samples: int,
    length: int,
    folder: Path | None,
    source: Path | None,
    json_path: Path | None,
) -> None:
    """Quantize one model on different numbers of GPUs, each time as a whole process."""
    work = Path(tempfile.mkdtemp(prefix="quantmint-bench-", dir=folder))
    result: dict[str, Any] = {"machine": describe("auto"), "shape": shape, "scheme": scheme, "gptq": gptq, "rows": []}
    result |= {"kv_cache": kv_cache, "samples": samples, "length": length}
    options = ["--scheme", scheme, "--format", "quark", "--device", "auto", "--kv-cache", kv_cache]
    if shape == "r1":
        options += ["--exclude", deepseek.EXCLUDED]
    try:
        model = source or work / "source"
        if not (model / "config.json").is_file():
            result["model_gb"] = write_source(model, shape, layers) / 1e9
        if gptq or kv_cache == "fp8":
            words = write_words(work, samples, length)
            options += ["--calibration", str(words.with_suffix(".yaml")), "--no-packing"]
            options += ["--samples", str(samples), "--sequence-length", str(length), "--batch-size", "8"]
        options += ["--algorithm", "gptq"] if gptq else []
        cases = [(int(count), False) for count in counts.split(",") if count]
        cases += [(int(count), True) for count in ray_counts.split(",") if count]
        for count, ray in cases:
            row = measure(options, model, work / "out", count, ray=ray)
            shutil.rmtree(work / "out", ignore_errors=True)
            result["rows"].append(row)
            click.echo(line(row))
            if json_path is not None:
                json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    digests = {row["sha256"] for row in result["rows"] if "sha256" in row}
    click.echo("bytes: " + ("equal" if len(digests) == 1 else f"{len(digests)} different checkpoints"))
    sys.exit(1 if len(digests) != 1 or any("why_not" in row for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
