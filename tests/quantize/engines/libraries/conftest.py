"""The fixture that runs a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quantmint.pipeline.quantize.engines.libraries.job import LibraryJob, save_samples
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from tests.quantize.engines.libraries.cases import Adopted, Case, Make, adopted, run_jobs

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def by_library(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    warm_library: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Make:
    """Run all cases of an engine in one process, and adopt what they left."""

    def make(engine: str, cases: Mapping[str, Case]) -> Mapping[str, Adopted]:
        python = warm_library(engine)
        root = tmp_path_factory.mktemp(f"with-{engine}")
        save_samples(blocks, root / "samples.safetensors")
        opened: dict[str, tuple[Checkpoint, Structure, Choice]] = {}
        for name, case in cases.items():
            source = open_checkpoint(models(case.model))
            structure = read_structure(source.folder, source.tensors)
            choice = select(structure, case.quantization(engine))
            opened[name] = (source, structure, choice)
            quantization = case.quantization(engine)
            LibraryJob(
                source=str(source.folder),
                output=str(root / f"{name}-made"),
                schemes={structure.modules[module]: scheme for module, scheme in choice.schemes.items()},
                kv_cache=choice.kv_cache,
                algorithm=quantization.algorithm,
                parameters=quantization.parameters,
                samples=str(root / "samples.safetensors") if case.calibrated else None,
                batch_size=4,
                device="cpu",
                trust_remote_code=False,
            ).save(root / f"{name}.json")
        run_jobs(python, engine, [root / f"{name}.json" for name in cases])
        return {name: adopted(root, name, engine, case, *opened[name]) for name, case in cases.items()}

    return make
