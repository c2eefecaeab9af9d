"""Checkpoints as they are made, by us and by others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.inspection.findings import Inspection
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure


def inspect(folder: Path, source: Path) -> Inspection:
    """As for a stranger: the structure is read from the checkpoint itself."""
    checkpoint, original = open_checkpoint(folder), open_checkpoint(source)
    structures = [read_structure(opened.folder, opened.tensors) for opened in (checkpoint, original)]
    return inspect_checkpoint(checkpoint, structures[0], source=original, source_structure=structures[1])


@pytest.mark.parametrize("checkpoint_format", ["compressed-tensors", "quark"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3", "mixtral", "qwen3-moe"])
def test_ours_pass(quantize: Callable[..., Any], model: str, sharded: bool, checkpoint_format: str) -> None:
    made = quantize(model, checkpoint_format, sharded=sharded)
    inspection = inspect_checkpoint(
        made.checkpoint,
        made.structure,
        source=made.source,
        expected=Expectations(made.expected_scales, sum(plan.nbytes - len(plan.header) for plan in made.plans)),
    )
    assert inspection.findings == ()
    assert inspection.quantized_modules == len(made.structure.linear)
    assert len(inspection.kv_scales) == 4
    worst = min(inspection.layers, key=lambda layer: layer.sqnr_db)
    assert inspection.summary() == (
        f"{len(made.structure.linear)} quantized modules, 4 KV scales, nothing missing; "
        f"least SQNR {worst.sqnr_db:.1f} dB at {worst.module}"
    )
    assert inspect(made.folder, made.source.folder).findings == ()


@pytest.mark.parametrize(("model", "modules"), [("mixtral", 32), ("qwen3-moe", 23)])
def test_every_expert_is_quantized_and_no_router(quantize: Callable[..., Any], model: str, modules: int) -> None:
    made = quantize(model, "compressed-tensors")
    dtypes = {name: info.dtype for name, (_, info) in made.checkpoint.tensors.items()}
    experts = [name for name in dtypes if ".experts." in name and name.endswith(".weight")]
    assert len(made.structure.linear) == modules
    assert len(experts) == (24 if model == "mixtral" else 12)
    assert {dtypes[name] for name in experts} == {"F8_E4M3"}
    routers = [name for name in dtypes if name.endswith((".gate.weight", "lm_head.weight", "embed_tokens.weight"))]
    assert len(routers) == (4 if model == "mixtral" else 3)
    assert {dtypes[name] for name in routers} == {"BF16"}
    ignored = made.checkpoint.config["quantization_config"]["ignore"]
    assert sorted(ignored) == sorted(name.removesuffix(".weight") for name in routers if "embed" not in name)


@pytest.mark.slow
def test_quarks_file_to_file_export_of_static_fp8_lacks_its_input_scales(
    by_quark: Callable[[str], Path], models: Callable[..., Path]
) -> None:
    """A defect of amd-quark 0.13: it declares static input scales, calibrates nothing and writes none."""
    inspection = inspect(by_quark("file-fp8"), models("llama"))
    assert {finding.rule for finding in inspection.findings} == {"missing scale"}
    assert len(inspection.findings) == 14
    assert all(finding.where.endswith(".input_scale") for finding in inspection.findings)
