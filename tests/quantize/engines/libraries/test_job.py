"""A job's file, and the tokens beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.quantize.engines import algorithms
from quantmint.pipeline.quantize.engines.libraries import with_llmcompressor, with_quark
from quantmint.pipeline.quantize.engines.libraries.job import LibraryJob, load_batches, save_samples


def job(samples: Path | None) -> LibraryJob:
    return LibraryJob(
        source="source",
        output="output",
        schemes={"in.a": "w4a16"},
        kv_cache=False,
        algorithm="gptq",
        parameters={"dampening": 0.01, "block_size": 128, "activation_order": True},
        samples=None if samples is None else str(samples),
        batch_size=2,
        device="cpu",
        trust_remote_code=False,
    )


def test_it_is_what_was_written(tmp_path: Path) -> None:
    save_samples([torch.arange(4), torch.arange(4, 8)], tmp_path / "samples")
    made = job(tmp_path / "samples")
    made.save(tmp_path / "job.json")
    assert LibraryJob.load(tmp_path / "job.json") == made


def test_the_tokens_are_those_that_were_saved(tmp_path: Path) -> None:
    samples = [torch.arange(3), torch.arange(5), torch.arange(10, 15), torch.arange(20, 25)]
    save_samples(samples, tmp_path / "samples")
    batches = list(load_batches(job(tmp_path / "samples")))
    assert all(batch.dtype == torch.int64 and batch.shape[0] <= 2 for batch in batches)
    rows = sorted(row.tolist() for batch in batches for row in batch)
    assert rows == sorted(sample.tolist() for sample in samples)
    assert list(load_batches(job(None))) == []


def test_the_workers_know_every_scheme_and_algorithm_of_the_tables() -> None:
    for name, row in table().items():
        assert ("llmcompressor" in row.engines) == (name in with_llmcompressor.PRESETS)
        assert ("quark" in row.engines) == (name in with_quark.specs())
    layer_wise = {name for name, row in algorithms.table().items() if row.calibrated and "llmcompressor" in row.engines}
    assert layer_wise == with_llmcompressor.LAYER_WISE
    for name, row in algorithms.table().items():
        for engine, support in row.engines.items():
            assert all(engine in table()[scheme].engines for scheme in support.schemes), (name, engine)
