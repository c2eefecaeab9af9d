"""How fast the stream engine is, beside `cp` of the same files and llm-compressor's file-to-file path.

::

    python -m tests.bench.stream --size 1 --rounds 3

A Llama of random weights is written to a temporary folder. Then each contender turns it into a copy, in a process of
its own and in turns, so that a machine that grows slower or faster harms none of them. Time counts from when the
libraries are imported; memory is the peak of the whole process. Ratios are those of medians.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
CONTENDERS = ("cp", "quantmint", "llm-compressor")
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 16, 8, 32_000
SHARD = 300e6  # bytes
IGNORE = ["lm_head", "re:.*embed_tokens$"]


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, in the order of a checkpoint."""
    head = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        found |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (HIDDEN,)),
                ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
                ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
                ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
                ("post_attention_layernorm", (HIDDEN,)),
                ("self_attn.k_proj", (KV_HEADS * head, HIDDEN)),
                ("self_attn.o_proj", (HIDDEN, HIDDEN)),
                ("self_attn.q_proj", (HIDDEN, HIDDEN)),
                ("self_attn.v_proj", (KV_HEADS * head, HIDDEN)),
            )
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path, gigabytes: float) -> int:
    """Write a model of about that size in files of about 300 MB; returns the bytes of its tensors."""
    import torch
    from transformers import LlamaConfig

    from pipeline.formats.checkpoint import INDEX_NAME
    from pipeline.formats.header import encode_header, tensor_bytes

    def size(tensors: dict[str, tuple[int, ...]]) -> int:
        return sum(tensor_bytes("BF16", shape) for shape in tensors.values())

    layers = max(1, round((gigabytes * 1e9 - size(shapes(0))) / (size(shapes(1)) - size(shapes(0)))))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(layers).items():
        if size(files[-1]) > SHARD:
            files.append({})
        files[-1][name] = shape
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    folder.mkdir(parents=True)
    for number, tensors in enumerate(files, start=1):
        shard = f"model-{number:05}-of-{len(files):05}.safetensors"
        with (folder / shard).open("wb") as stream:
            stream.write(encode_header((name, "BF16", shape) for name, shape in tensors.items()))
            for name, shape in tensors.items():
                weight = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
                stream.write(weight.view(torch.uint8).numpy().data)
                weight_map[name] = shard
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": size(shapes(layers))}, "weight_map": weight_map})
    )
    LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return size(shapes(layers))


def work(contender: str, source: Path, destination: Path) -> float:
    """Do what is measured, in this process; returns seconds without imports."""
    if contender == "cp":
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, destination], check=True)
        return time.perf_counter() - started
    if contender == "llm-compressor":
        from llmcompressor import model_free_ptq

        started = time.perf_counter()
        model_free_ptq(
            model_stub=str(source),
            save_directory=str(destination),
            scheme="FP8_DYNAMIC",
            ignore=IGNORE,
            max_workers=os.cpu_count() or 1,
            device="cpu",
        )
        return time.perf_counter() - started
    from pipeline.engines.stream.engine import write_checkpoint
    from pipeline.engines.stream.plan import plan_shards
    from pipeline.formats.checkpoint import open_checkpoint
    from pipeline.formats.layout import Choice
    from pipeline.model.structure import read_structure

    read_structure(source, {})  # transformers imports the code of a model when it is first built
    started = time.perf_counter()
    checkpoint = open_checkpoint(source)
    structure = read_structure(source, checkpoint.tensors)
    choice = Choice(dict.fromkeys(structure.linear, "ptpc_fp8"), structure.kept, False)
    plans = plan_shards(checkpoint, choice, structure.attention, "compressed-tensors")
    manifest = destination.with_name("manifest.jsonl")
    write_checkpoint(
        checkpoint, plans, choice, {}, destination, checkpoint_format="compressed-tensors", manifest=manifest
    )
    manifest.unlink()
    return time.perf_counter() - started


def measure(contender: str, source: Path, destination: Path) -> tuple[float, float]:
    """Run a contender in its own process; returns seconds and the peak of its memory in bytes."""
    os.sync()
    command = [sys.executable, "-m", "tests.bench.stream", "--only", contender, str(source), str(destination)]
    finished = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = finished.stdout.splitlines()
    if finished.returncode:
        raise click.ClickException("\n".join([f"{contender} failed", *lines[-20:]]))
    seconds, peak = map(float, lines[-1].split())
    return seconds, peak


def peak_memory() -> int:
    """Largest resident size of this process, bytes; `ru_maxrss` would count its parent's before the exec as well."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit for bit, in whatever files."""
    import torch

    from pipeline.formats.checkpoint import open_checkpoint
    from pipeline.inspection.numbers import Reader

    left, right = open_checkpoint(one), open_checkpoint(other)
    read_left, read_right = Reader(left), Reader(right)
    return left.tensors.keys() == right.tensors.keys() and all(
        torch.equal(*(read(name).reshape(-1).view(torch.uint8) for read in (read_left, read_right)))
        for name in left.tensors
    )


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


def compare(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all contenders in turns."""
    machine = hardware()
    size = write_model(folder / "source", gigabytes)
    runs: dict[str, list[tuple[float, float]]] = {contender: [] for contender in CONTENDERS}
    identical = False
    for number in range(rounds):
        for contender in CONTENDERS[number % 3 :] + CONTENDERS[: number % 3]:
            shutil.rmtree(folder / contender, ignore_errors=True)
            runs[contender].append(measure(contender, folder / "source", folder / contender))
        if number == 0:
            identical = same_weights(folder / "quantmint", folder / "llm-compressor")
    rows = {
        contender: {
            "seconds": [round(seconds, 2) for seconds, _ in measured],
            "median_seconds": round(statistics.median(seconds for seconds, _ in measured), 2),
            "peak_mb": None if contender == "cp" else round(max(peak for _, peak in measured) / 1e6),
        }
        for contender, measured in runs.items()
    }
    return {"model_gb": round(size / 1e9, 2), "hardware": machine, "same_bytes": identical, "contenders": rows}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    rows = result["contenders"]
    medians = {name: row["median_seconds"] for name, row in rows.items()}
    machine = result["hardware"]
    lines = [
        f"{result['model_gb']} GB of bf16 to PTPC-FP8 on {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gb']} GB, {machine['simd']}, torch {machine['torch']}, load {machine['load_before']} before",
        "",
        f"{'':<16}{'median s':>10}{'GB/s':>8}{'x cp':>8}{'x llm-c.':>10}{'peak MB':>10}   all runs, s",
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<16}{medians[name]:>10.2f}{result['model_gb'] / medians[name]:>8.2f}"
            f"{medians[name] / medians['cp']:>8.2f}{medians[name] / medians['llm-compressor']:>10.2f}"
            f"{row['peak_mb'] or '-':>10}   {' '.join(f'{seconds:.2f}' for seconds in row['seconds'])}"
        )
    same = "the same bytes" if result["same_bytes"] else "DIFFERENT bytes"
    return "\n".join([*lines, "", f"quantmint and llm-compressor wrote {same}."])


@click.command()
@click.option("--size", default=1.0, show_default=True, help="Size of the model, GB.")
@click.option("--rounds", default=3, show_default=True, help="How often each contender runs.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work; three times the size must be free.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--only", type=click.Choice(CONTENDERS), hidden=True)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
def main(
    size: float, rounds: int, folder: Path | None, as_json: bool, only: str | None, paths: tuple[Path, ...]
) -> None:
    """Compare the stream engine with cp and llm-compressor."""
    if only:
        seconds = work(only, *paths)
        click.echo(f"\n{seconds} {peak_memory()}")
        return
    with tempfile.TemporaryDirectory(prefix="quantmint-bench-", dir=folder) as temporary:
        result = compare(size, rounds, Path(temporary))
    click.echo(json.dumps(result, indent=1) if as_json else table(result))
    sys.exit(0 if result["same_bytes"] else 1)


if __name__ == "__main__":
    main()
