"""Inspection on every scheme that the engine makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.inspection.findings import Inspection
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint

PAIRS = [(name, layout) for name, row in table().items() for layout in row.formats if "stream" in row.makers(layout)]
MODULE = "model.layers.0.mlp.down_proj"
# What rounding to the type keeps of random weights, dB.
EXPECTED_DB = {
    "ptpc_fp8": 29, "fp8": 29, "fp8_block": 29, "mxfp4": 16, "mxfp4_weight_only": 16, "mxfp4_fp8": 16,
    "mxfp6_e2m3": 28, "mxfp6_e3m2": 23, "mxfp8": 29, "int8_w8a8": 38,
}  # fmt: skip
EXPECTED_DB |= {"w4a16": 17, "nvfp4": 17, "nvfp4_weight_only": 17}


def inspect(made: Any, folder: Any) -> Inspection:
    return inspect_checkpoint(
        open_checkpoint(folder),
        made.structure,
        source=made.source,
        expected=Expectations(made.expected_scales, made.checkpoint.nbytes),
    )


@pytest.mark.parametrize(("scheme", "checkpoint_format"), PAIRS)
@pytest.mark.parametrize("kv_cache", [False, True])
def test_what_the_engine_makes_is_sound(
    quantize: Callable[..., Any], scheme: str, checkpoint_format: str, kv_cache: bool
) -> None:
    made = quantize("llama", checkpoint_format, kv_cache=kv_cache, scheme=scheme)
    inspection = inspect(made, made.folder)
    assert inspection.findings == ()
    assert {layer.scheme for layer in inspection.layers} == {scheme}
    assert all(EXPECTED_DB[scheme] < layer.sqnr_db < EXPECTED_DB[scheme] + 6 for layer in inspection.layers)
    assert len(inspection.kv_scales) == (4 if kv_cache else 0)


@pytest.mark.parametrize("checkpoint_format", ["compressed-tensors", "quark"])
def test_an_input_scale_that_was_not_measured_is_found(
    quantize: Callable[..., Any], breakable: Callable[..., Any], checkpoint_format: str
) -> None:
    made = quantize("llama", checkpoint_format, scheme="fp8")
    broken = breakable(made.folder)
    name = f"{MODULE}.input_scale"
    broken.tensors[name] = broken.tensors[name] * 2
    findings = inspect(made, broken.save()).findings
    assert [(finding.rule, finding.where) for finding in findings] == [("wrong scale", name)]
