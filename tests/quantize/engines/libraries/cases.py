"""Checkpoints for the libraries to make through our workers: all of a library's in one process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quantmint.pipeline.quantize.engines.algorithms import recorded_algorithms
from quantmint.pipeline.quantize.engines.libraries.result import adopt, differences, names_on_disk
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Quantization

FORMATS = {"llmcompressor": "compressed-tensors", "quark": "quark"}


@dataclass(frozen=True)
class Case:
    """One checkpoint to make; ``section`` is what the recipe says beside scheme, engine and format."""

    model: str
    scheme: str
    section: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True

    def quantization(self, engine: str) -> Quantization:
        values = {"scheme": self.scheme, "engine": engine, "format": FORMATS[engine], **self.section}
        return Quantization.model_validate(values)


KV = {"kv_cache": "fp8"}
OVERRIDES = [{"modules": [r"re:.*self_attn\..*"], "scheme": "fp8"}]
MIXED = Case("llama", "mxfp4", {**KV, "overrides": OVERRIDES, "exclude": [r"re:.*layers\.1\.mlp\..*"]})


@dataclass(frozen=True)
class Adopted:
    """What became of a case: the checkpoint under the source's names, and where it is not what was asked for."""

    source: Checkpoint
    structure: Structure
    choice: Choice
    folder: Path
    wrong: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)


Make = Callable[[str, Mapping[str, Case]], Mapping[str, Adopted]]


def run_jobs(python: Path, engine: str, jobs: Iterable[Path]) -> None:
    """Run them with a Python whose programs have imported the library."""
    jobs = list(jobs)
    ended = subprocess.run(
        [
            python,
            "-m",
            "tests.quantize.oracles.library_jobs",
            f"quantmint.pipeline.quantize.engines.libraries.with_{engine}",
            *jobs,
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    failed = {job.stem: job.with_suffix(".failed").read_text() for job in jobs if job.with_suffix(".failed").exists()}
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert not failed, failed


def adopted(
    root: Path, name: str, engine: str, case: Case, source: Checkpoint, structure: Structure, choice: Choice
) -> Adopted:
    folder = root / f"{name}-adopted"
    adopt(root / f"{name}-made", folder, names_on_disk(source, structure), source, choice, FORMATS[engine])
    wrong = differences(
        open_checkpoint(folder),
        source,
        structure,
        choice,
        checkpoint_format=FORMATS[engine],
        algorithm_name=case.quantization(engine).algorithm,
    )
    return Adopted(source, structure, choice, folder, tuple(wrong))


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: t for shard in checkpoint.shards for name, t in load_file(checkpoint.folder / shard).items()}


def assert_as_asked(case: Case, adopted: Adopted, compared: Sequence[str]) -> None:
    """What a library left is what the case asked for; ``compared`` are the algorithms whose error can be measured."""
    assert adopted.wrong == ()
    wanted = case.section.get("algorithm", "none")
    assert recorded_algorithms(adopted.checkpoint) == (() if wanted == "none" else (wanted,))
    inspection = inspect_checkpoint(adopted.checkpoint, adopted.structure, source=adopted.source)
    # A library alone leaves no copies of the files beside the weights: the stage does.
    beside = ("generation_config.json", "tokenizer_config.json")
    assert [finding for finding in inspection.findings if not finding.where.startswith(beside)] == []
    assert inspection.quantized_modules == len(adopted.choice.schemes)
    assert len(inspection.kv_scales) == (4 if "kv_cache" in case.section else 0)
    schemes = set(adopted.choice.schemes.values()) if wanted in compared else set()
    assert {layer.scheme for layer in inspection.layers} == schemes
