"""Measure `quantmint quantize` on DeepSeek R1's shape: FP8 blocks, or MXFP4, in; MXFP4 in Quark's layout out.

::

    python -m tests.bench.deepseek --layers 4 --source /dev/shm/r1 --out /data/r1-mxfp4 --json r1.json
    python -m tests.bench.deepseek --source /data/r1 --source-scheme mxfp4 --out /data/r1-fp8 --scheme ptpc_fp8
    python -m tests.bench.deepseek --layers 1 --experts 64 --source /tmp/r1 --out /tmp/r1-mxfp4 --device cpu

Layers have the release's sizes and tensor names; their number and that of the experts are options. ``--narrow`` makes
each matrix small, which leaves what the number of modules costs. The source is written where ``--source`` says, unless
a model of that shape is there already; with ``--source-scheme`` it is converted to that scheme first, untimed, and the
command starts from the result. The command is timed from its start to its exit, on a model that it has not seen before.
After it, on the disk of ``--out``, two limits are measured: as many random bytes as the checkpoint has, past the page
cache, and `cp` of the source. As many, because a disk that is lent is often fast for some gigabytes only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click

from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, encode_header, tensor_bytes
from tests.bench.disk import disk_limit, flush
from tests.bench.model import describe, into_page_cache, write_tokenizer

ROOT = Path(__file__).parents[2]
EXCLUDED = r"re:.*\.self_attn\..*"
"""Modules that stay in 16 bit, as in recipes/deepseek-r1-mxfp4.yaml."""
_CONFIG = ROOT / "tests" / "assets" / "configs" / "DeepSeek-R1-0528" / "config.json"
_CHILD = Path(__file__).with_name("child.py")
_SHARD_BYTES = 4_300_000_000  # the release has 163 shards of about that size
_BLOCK = 128  # rows and columns that share a scale
_VALUES = (1 << 23) + 9  # elements; prime to every row length, so that rows of a tensor differ
_ORDER = ("F32", "BF16", "F8_E4M3")  # the safetensors library sorts a file's tensors by dtype, then by name
_NARROW = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
_SAMPLE_S = 0.25  # seconds between two looks at the GPU's memory

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of decoder layers, of dense layers among them (the first ones), and of routed experts in a layer.

    ``narrow`` makes hidden states and all that follows from them 1/28 as wide.
    """

    layers: int
    dense: int
    experts: int
    narrow: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The release's config.json with these numbers, without its multi-token predictor."""
        config = json.loads(_CONFIG.read_text(encoding="utf-8"))
        return config | {
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.dense,
            "n_routed_experts": self.experts,
            "num_nextn_predict_layers": 0,
            **(_NARROW if self.narrow else {}),
        }

    def shards(self) -> list[Tensors]:
        """Return the tensors of each file: layers in their order, cut at the size of the release's files."""
        files: list[Tensors] = [{}]
        size = 0
        for name, tensor in self._tensors():
            size += tensor_bytes(*tensor)
            if size > _SHARD_BYTES:
                files.append({})
                size = tensor_bytes(*tensor)
            files[-1][name] = tensor
        return [dict(sorted(file.items(), key=lambda item: (_ORDER.index(item[1][0]), item[0]))) for file in files]

    def _tensors(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        config = self.config
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        yield "model.embed_tokens.weight", ("BF16", (vocabulary, hidden))
        for layer in range(self.layers):
            yield from self._layer(f"model.layers.{layer}", config, mixture=layer >= self.dense)
        yield "model.norm.weight", ("BF16", (hidden,))
        yield "lm_head.weight", ("BF16", (vocabulary, hidden))

    def _layer(
        self, prefix: str, config: Mapping[str, Any], *, mixture: bool
    ) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        queries, latent, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
        for norm, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_a_layernorm", queries),
            ("self_attn.kv_a_layernorm", latent),
        ):
            yield f"{prefix}.{norm}.weight", ("BF16", (size,))
        matrices = {
            "self_attn.q_a_proj": (queries, hidden),
            "self_attn.q_b_proj": (heads * (plain + rope), queries),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            "self_attn.kv_b_proj": (heads * (plain + value), latent),
            "self_attn.o_proj": (hidden, heads * value),
        }
        if mixture:
            yield f"{prefix}.mlp.gate.weight", ("BF16", (self.experts, hidden))
            yield f"{prefix}.mlp.gate.e_score_correction_bias", ("F32", (self.experts,))
            width = config["moe_intermediate_size"]
            names = [f"mlp.experts.{expert}" for expert in range(self.experts)]
            sizes = dict.fromkeys(names, width) | {"mlp.shared_experts": width * config["n_shared_experts"]}
        else:
            sizes = {"mlp": config["intermediate_size"]}
        for name, width in sizes.items():
            matrices |= {f"{name}.{part}_proj": (width, hidden) for part in ("gate", "up")}
            matrices[f"{name}.down_proj"] = (hidden, width)
        for name, (rows, columns) in matrices.items():
            yield f"{prefix}.{name}.weight", ("F8_E4M3", (rows, columns))
            yield f"{prefix}.{name}.weight_scale_inv", ("F32", (ceil(rows / _BLOCK), ceil(columns / _BLOCK)))


def write_source(folder: Path, shape: Shape) -> int:
    """Write a model of random numbers; return the bytes of its tensors. A folder of the same shape is left as it is."""
    files = shape.shards()
    total = sum(tensor_bytes(*tensor) for file in files for tensor in file.values())
    if (folder / "config.json").is_file():
        known = json.loads((folder / INDEX_NAME).read_text())["metadata"]["total_size"]
        if json.loads((folder / "config.json").read_text()) != shape.config or known != total:
            raise click.UsageError(f"--source: {folder} holds a model of another shape; remove it.")
        return total
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{len(files):06}.safetensors" for number in range(1, len(files) + 1)]
    values = _random_values()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_write_shard, [folder / name for name in names], files, [values] * len(files)))
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    write_tokenizer(folder, shape.config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    return total


def _random_values() -> dict[str, memoryview]:
    """Return bytes of random numbers by dtype: FP8 codes as wide as a block's scale makes them, scales near 2e-4."""
    import torch

    numbers = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0))
    tensors = {
        "F8_E4M3": (numbers * 100).clamp(-448, 448).to(torch.float8_e4m3fn),  # clamped: NaN is not among them
        "BF16": (numbers * 0.02).bfloat16(),
        "F32": (numbers * 0.2).exp() * 2e-4,
    }
    return {dtype: memoryview(tensor.view(torch.uint8).numpy().data) for dtype, tensor in tensors.items()}


def _write_shard(path: Path, tensors: Tensors, values: Mapping[str, memoryview]) -> None:
    with path.open("wb") as stream:
        stream.write(encode_header((name, dtype, shape) for name, (dtype, shape) in tensors.items()))
        for name, (dtype, shape) in tensors.items():
            left, width = tensor_bytes(dtype, shape), tensor_bytes(dtype, (1,))
            start = width * (int.from_bytes(sha256(name.encode()).digest()[:8], "little") % _VALUES)
            while left:
                part = values[dtype][start : start + left]
                stream.write(part)
                left -= part.nbytes
                start = 0


def copy_source(source: Path, folder: Path) -> dict[str, float]:
    """Copy the weight files with `cp` as far as the disk has room, flush and remove them: ``gb`` and ``seconds``."""
    free, files = shutil.disk_usage(folder).free, []
    for path in sorted(source.glob("*.safetensors")):
        if sum(known.stat().st_size for known in (*files, path)) < free * 0.9:
            files.append(path)
    copy = Path(tempfile.mkdtemp(prefix="copy-", dir=folder))
    try:
        started = time.perf_counter()
        subprocess.run(["cp", *map(str, files), str(copy)], check=True)
        flush(copy)
        seconds = time.perf_counter() - started
    finally:
        shutil.rmtree(copy)
    return {"gb": sum(path.stat().st_size for path in files) / 1e9, "seconds": seconds}


@contextmanager
def watching_gpus(found: dict[str, float]) -> Iterator[None]:
    """Within the block, sample the memory that all GPUs have in use; put the growth in ``found`` as ``gpu_gb``.

    Without a working ``nvidia-smi`` nothing is measured.
    """
    try:
        ended, samples = Event(), [_gpu_bytes()]
    except (OSError, subprocess.CalledProcessError):
        yield
        return

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            samples.append(_gpu_bytes())

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found["gpu_gb"] = (max(samples) - samples[0]) / 1e9


def _gpu_bytes() -> int:
    order = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    text = subprocess.run(order, capture_output=True, text=True, check=True).stdout
    return sum(int(line) for line in text.split()) << 20


def quantize(
    source: Path, out: Path, *, scheme: str, layout: str, device: str, cache: Path, threads: int | None, sampled: bool
) -> dict[str, Any]:
    """Run `quantmint quantize` as a process; return ``wall`` and ``cpu`` seconds, ``rss`` bytes, its own ``record``.

    ``threads`` is the number of cores, or of threads of each GPU. With ``sampled`` there are also ``samples``: what the
    engine's threads stood on, see `tests.bench.sampled`.

    Raises `click.ClickException` with the end of its standard error where it fails.
    """
    logs = [Path(f"{out}.stdout"), Path(f"{out}.stderr")]
    options = ["--scheme", scheme, "--format", layout, "--exclude", EXCLUDED, "--device", device, "--json"]
    samples, program = cache / "samples.json", ["-m", "quantmint"]
    if sampled or (threads is not None and device != "cpu"):
        workers = [] if threads is None or device == "cpu" else ["--workers", str(threads)]
        program = ["-m", "tests.bench.sampled", str(samples), *workers, "--"]
    if threads is not None and device == "cpu":
        options += ["--threads", str(threads)]
    order = [sys.executable, *program, "quantize", str(source), str(out), *options]
    child = [sys.executable, "-I", str(_CHILD), *map(str, logs), *order]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}
    run: dict[str, Any] = {}
    with watching_gpus(run):
        run |= json.loads(subprocess.run(child, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
    stdout, stderr = (path.read_text(errors="replace") for path in logs)
    for path in logs:
        path.unlink()
    if run.pop("code"):
        raise click.ClickException("quantmint quantize failed:\n" + "\n".join(stderr.splitlines()[-20:]))
    run["wall"] = run.pop("ended") - run.pop("begun")
    run["record"] = json.loads(("\n" + stdout)[("\n" + stdout).rindex("\n{") :])
    if sampled:
        run["samples"] = [row for row in json.loads(samples.read_text()) if row[0] in ("worker", "commit", "inspect")]
    return run


def report(result: Mapping[str, Any]) -> str:
    """Word a result for people: sizes, rates beside the limits of the disk, seconds by part and by kind of work."""
    run, record, machine = result["run"], result["run"]["record"], result["machine"]
    source, out, seconds = record["source_bytes"] / 1e9, record["bytes"] / 1e9, record["seconds"]
    writing = seconds["work"] + seconds.get("flush", 0.0)
    limits = {name: limit["gb"] / limit["seconds"] for name, limit in result["limits"].items()}
    lines = [
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gb']} GB"
        + (f", {machine['accelerator']}" if machine["accelerator"] else "")
        + f"; torch {machine['torch']}, load before {machine['load_before']}",
        f"{source:.2f} GB of {result['source_scheme']} in {result['files']} files -> "
        f"{out:.2f} GB of {result['scheme']}, on {result['device']}",
        f"whole process {run['wall']:.1f} s, CPU {run['cpu']:.1f} s, {run['rss'] / 1e9:.2f} GB resident"
        + (f", {run['gpu_gb']:.2f} GB on the GPU" if "gpu_gb" in run else ""),
        "parts, s: " + ", ".join(f"{part} {took:.2f}" for part, took in seconds.items()),
        "engine, s over threads: " + ", ".join(f"{kind} {took:.2f}" for kind, took in record["engine_seconds"].items()),
        f"work and flush: {source / writing:.2f} GB/s of source, {out / writing:.2f} GB/s of output",
        f"whole process: {source / run['wall']:.2f} GB/s of source, {out / run['wall']:.2f} GB/s of output",
        f"CPU: {run['cpu'] / source:.2f} s a GB of source",
    ]
    if "write" in limits:
        share = out / writing / limits["write"]
        lines.append(
            f"disk, random bytes past the page cache: {limits['write']:.2f} GB/s; output at {share:.2f} of it, "
            f"written and read back at {2 * share:.2f}"
        )
    if "copy" in limits:
        share = source / writing / limits["copy"]
        lines.append(f"cp of the source, flushed: {limits['copy']:.2f} GB/s; source at {share:.2f} of it")
    if "samples" in run:
        total = sum(count for pool, _, count in run["samples"] if pool == "worker")
        workers = [(place, count) for pool, place, count in run["samples"] if pool == "worker"]
        lines += [f"{count / total:6.1%}  {place}" for place, count in workers[:40]]
    return "\n".join(lines)


@click.command()
@click.option("--layers", default=4, show_default=True, help="Decoder layers; each mixture has 11.5 GB.")
@click.option("--dense", type=int, help="Dense layers before the mixtures (default: 1; 0 with --layers 1).")
@click.option("--experts", default=256, show_default=True, help="Routed experts of a mixture.")
@click.option("--narrow", is_flag=True, help="Make hidden states 256 wide: the cost of modules, not of bytes.")
@click.option("--source", type=click.Path(path_type=Path), required=True, help="Write the source there, or find it.")
@click.option("--source-scheme", help="Convert the source to that scheme first, beside it: mxfp4.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Write the checkpoint there: a new folder.")
@click.option("--scheme", default="mxfp4", show_default=True, help="Quantize to that scheme.")
@click.option("--format", "layout", default="quark", show_default=True, help="Write that layout.")
@click.option("--device", default="auto", show_default=True, help="Compute there: auto, cpu, cuda:0.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores, or threads of each GPU (default: the engine's).")
@click.option("--sampled", is_flag=True, help="Also print the lines that the workers stand on.")
@click.option("--rounds", default=1, show_default=True, help="Repeat the command; all but the first know the model.")
@click.option("--limits/--no-limits", default=True, show_default=True, help="Measure the disk and cp as well.")
@click.option("--keep", is_flag=True, help="Leave source and checkpoint where they are.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there, one a line.")
def main(
    layers: int,
    dense: int | None,
    experts: int,
    narrow: bool,
    source: Path,
    source_scheme: str | None,
    out: Path,
    scheme: str,
    layout: str,
    device: str,
    threads: int | None,
    sampled: bool,
    rounds: int,
    limits: bool,
    keep: bool,
    json_path: Path | None,
) -> None:
    """Measure `quantmint quantize` on DeepSeek R1's shape, from start to exit.

    Example: python -m tests.bench.deepseek --layers 4 --source /dev/shm/r1 --out /data/r1-mxfp4
    """
    if out.exists():
        raise click.UsageError(f"--out: {out} is there already; name a new folder.")
    shape = Shape(layers, min(1, layers - 1) if dense is None else dense, experts, narrow)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "machine": describe(device),
        "device": device,
        "source_scheme": source_scheme or "fp8_block",
        "scheme": scheme,
        "shape": {"layers": shape.layers, "dense": shape.dense, "experts": shape.experts, "narrow": narrow},
        "limits": {},
    }
    cache = Path(tempfile.mkdtemp(prefix="quantmint-bench-"))
    written = source
    try:
        started = time.perf_counter()
        total = write_source(written, shape)
        if source_scheme is not None:
            source = written.with_name(f"{written.name}-{source_scheme}")
            how = {"scheme": source_scheme, "layout": "quark", "device": device, "threads": None, "sampled": False}
            quantize(written, source, cache=cache, **how)
            shutil.rmtree(source / "quantmint")
            total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            if not keep:
                shutil.rmtree(written)
        result["files"] = len(list(source.glob("*.safetensors")))
        click.echo(f"source: {total / 1e9:.2f} GB, written or found in {time.perf_counter() - started:.1f} s")
        into_page_cache(source)
        for number in range(rounds):
            how = {"scheme": scheme, "layout": layout, "device": device, "threads": threads, "sampled": sampled}
            result["run"] = quantize(source, out, cache=cache, **how)
            if not keep or number + 1 < rounds:
                shutil.rmtree(out)
            if limits:
                result["limits"] = {
                    "write": disk_limit(out.absolute().parent, result["run"]["record"]["bytes"]),
                    "copy": copy_source(source, out.absolute().parent),
                }
            if json_path is not None:
                with json_path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(result) + "\n")
            click.echo(report(result))
    finally:
        shutil.rmtree(cache)
        if not keep:
            for folder in (written, source, out):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
