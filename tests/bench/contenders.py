"""What is measured: each contender's own way to make a checkpoint, in a process that runs nothing else.

A contender is a function that imports what it needs and returns the work, which can then be timed without its imports.
The work returns the seconds of its parts where it knows them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LLM_COMPRESSOR = {"ptpc_fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "mxfp4": "MXFP4", "fp8_kv": "FP8"}
QUARK = {"ptpc_fp8": "ptpc_fp8", "mxfp4": "mxfp4", "fp8_kv": "fp8"}
CASES: Mapping[str, str] = {
    "ptpc_fp8": "FP8, weights per channel, no calibration",
    "fp8_block": "FP8, weights per block of 128 x 128, no calibration",
    "mxfp4": "MXFP4, no calibration",
    "fp8_kv": "FP8 with static scales of inputs and KV cache, calibrated",
}
BATCH = 8
IGNORE = ["lm_head", "re:.*embed_tokens$"]
_KV = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "static_minmax",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to make: ``case`` of `CASES` on ``device``, calibrated with ``samples`` blocks of ``length`` tokens.

    ``mode`` says how ours calibrates: resident, layer, or auto.
    """

    case: str
    device: str
    samples: int
    length: int
    mode: Any = "auto"

    @property
    def calibrated(self) -> bool:
        return self.case == "fp8_kv"

    def tokens(self, source: Path) -> Any:
        """Random token ids of [samples, length], int64, from the model's own vocabulary."""
        import json

        import torch

        vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        return torch.randint(vocabulary, (self.samples, self.length), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class Done:
    """What the work knows of itself: seconds by phase, those of all threads together by what they did, and ``tail``,
    the seconds that it only waited for the disk in the end."""

    phases: Mapping[str, float]
    threads: Mapping[str, float] = field(default_factory=dict)
    tail: float = 0.0


Work = Callable[[Path, Path], Done]
"""From a source folder to a new folder."""


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def how(contender: str, case: str) -> str | None:
    """Which of a contender's ways makes a case, in its own words; None where it has none."""
    if contender == "llm-compressor":
        return ("oneshot " if case == "fp8_kv" else "model_free_ptq ") + LLM_COMPRESSOR[case]
    if contender == "quark":
        return None if case not in QUARK else ("in memory " if case == "fp8_kv" else "file to file ") + QUARK[case]
    return {"cp": "cp -r", "quantmint": "stream"}[contender]


def absent(contender: str) -> bool:
    """Whether what a contender needs is not installed."""
    package = {"llm-compressor": "llmcompressor", "quark": "quark"}.get(contender)
    return package is not None and find_spec(package) is None


def cp(task: Task) -> Work:
    def work(source: Path, destination: Path) -> Done:
        subprocess.run(["cp", "-r", source, destination], check=True)
        return Done({})

    return work


def quantmint(task: Task) -> Work:
    """The public functions that the stages calibrate and quantize call."""
    import torch  # noqa: F401  # counted as an import, and not as the work that first asks for it
    from transformers import AutoModelForCausalLM  # noqa: F401

    from calibration.batches import batched
    from calibration.calibrate import calibrate
    from calibration.observers import Observation
    from pipeline.base.progress import PlainReporter
    from pipeline.quantize.engines.stream.engine import scale_ranges, write_checkpoint
    from pipeline.quantize.engines.stream.plan import plan_shards
    from pipeline.quantize.formats.checkpoint import open_checkpoint
    from pipeline.quantize.formats.layout import Choice
    from pipeline.quantize.model.structure import read_structure

    form = "compressed-tensors"

    def work(source: Path, destination: Path) -> Done:
        clock = Clock()
        with clock.phase("plan"):
            checkpoint = open_checkpoint(source)
            structure = read_structure(source, checkpoint.tensors)
            scheme = "fp8" if task.calibrated else task.case
            choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, task.calibrated)
            plans = plan_shards(checkpoint, structure, choice, form)
        ranges: Mapping[str, float] = {}
        if task.calibrated:
            with clock.phase("calibrate"):
                outcome = calibrate(
                    source,
                    list(batched(task.tokens(source), BATCH)),
                    Observation(),
                    devices=[task.device],
                    work=destination.with_name(f"{destination.name}.states"),
                    watcher=PlainReporter(sys.stderr),
                    mode=task.mode,
                )
                ranges = scale_ranges(outcome.ranges, choice, form)
        manifest = destination.with_name(f"{destination.name}.manifest.jsonl")
        with clock.phase("write"):
            written = write_checkpoint(
                checkpoint,
                plans,
                choice,
                ranges,
                destination,
                checkpoint_format=form,
                manifest=manifest,
                devices=[task.device],
            )
        manifest.unlink()
        threads = dict(written.seconds)
        tail = threads.pop("durable") - threads.pop("written")
        return Done(clock.seconds, threads, tail)

    return work


def llm_compressor(task: Task) -> Work:
    return _oneshot(task) if task.calibrated else _model_free_ptq(task)


def _model_free_ptq(task: Task) -> Work:
    from llmcompressor import model_free_ptq

    def work(source: Path, destination: Path) -> Done:
        model_free_ptq(
            model_stub=str(source),
            save_directory=str(destination),
            scheme=LLM_COMPRESSOR[task.case],
            ignore=IGNORE,
            max_workers=min(4, os.cpu_count() or 1),
            device=task.device,
        )
        return Done({})

    return work


def _oneshot(task: Task) -> Work:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    def work(source: Path, destination: Path) -> Done:
        clock = Clock()
        with clock.phase("load"):
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            ids = task.tokens(source).tolist()
            rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
        with clock.phase("calibrate"):
            oneshot(
                model=model,
                dataset=rows,
                recipe=QuantizationModifier(
                    targets="Linear", ignore=["lm_head"], scheme=LLM_COMPRESSOR[task.case], kv_cache_scheme=_KV
                ),
                max_seq_length=task.length,
                num_calibration_samples=task.samples,
                batch_size=min(BATCH, task.samples),
                shuffle_calibration_samples=False,
            )
        with clock.phase("write"):
            model.save_pretrained(destination, save_compressed=True)
        return Done(clock.seconds)

    return work


def quark(task: Task) -> Work:
    import torch
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
    from transformers import AutoModelForCausalLM

    config: Any = LLMTemplate.get("llama").get_config(
        QUARK[task.case], kv_cache_scheme="fp8" if task.calibrated else None
    )

    def from_file(source: Path, destination: Path) -> Done:
        ModelQuantizer(config).direct_quantize_checkpoint(str(source), str(destination), device=task.device)
        return Done({})

    def in_memory(source: Path, destination: Path) -> Done:
        clock = Clock()
        with clock.phase("load"):
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(task.device)
        with clock.phase("calibrate"):
            batches = list(task.tokens(source).to(task.device).split(BATCH))
            model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
        with clock.phase("write"), torch.no_grad():
            export_safetensors(model, str(destination))
        return Done(clock.seconds)

    if not task.calibrated:
        return from_file
    config.kv_cache_post_rope = True
    return in_memory


CONTENDERS: Mapping[str, Callable[[Task], Work]] = {
    "cp": cp,
    "quantmint": quantmint,
    "llm-compressor": llm_compressor,
    "quark": quark,
}
