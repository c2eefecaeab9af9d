"""What becomes of each quantized source is what docs/models.md says: bytes, very numbers, or rounded numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.calibration.encodings import recognise
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from tests.commands.test_integer_sources import sources
from tests.zoo.page import PAGE, TARGETS, short_outcome, source_table

Quantmint = Callable[..., Any]
Models = Callable[..., Path]

MADE = {
    "fp8_block": "fp8_block", "fp8_channel": "ptpc_fp8", "fp8_tensor": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4",
    "nvfp4": "nvfp4", "int4": "w4a16",
}  # fmt: skip
"""Schemes that make a source in an encoding."""
MLP = ("--exclude", "re:.*self_attn.*")  # of fewer rows than a block


def test_the_page_has_the_table() -> None:
    assert "\n".join(source_table()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [*MADE, "int4_zero", "awq", "gptq"])
def test_a_source_becomes_what_the_table_says(
    quantmint: Quantmint, models: Models, words: tuple[str, ...], encoding: str
) -> None:
    if encoding in MADE:
        more = words if encoding in ("fp8_tensor", "nvfp4") else ()
        made = quantmint("quantize", models("llama"), "first", "--scheme", MADE[encoding], *MLP, *more)
        assert made.code == 0, made.err
    else:
        sources(models("llama"), {"int4_zero": "asymmetric"}.get(encoding, encoding))
    checkpoint = open_checkpoint(Path("first"))
    stored = {name: (info.dtype, info.shape) for name, (_, info) in checkpoint.tensors.items()}
    found = {recognise(stored, name, checkpoint.config["quantization_config"]) for name in stored if "_proj." in name}
    assert {each.encoding for each in found if each is not None} == {encoding}
    for target in TARGETS:
        made = quantmint("quantize", "first", target, "--scheme", target, *MLP, "--json")
        assert made.code == 0, made.err
        exact = json.loads(made.out)["exact"]
        outcome = short_outcome(encoding, target)
        assert exact == {"bytes": 6, "exact": 6, "rounded": 0}.get(outcome, exact), target
        inspected = quantmint("inspect", target, "--source", "first")
        assert inspected.code == 0, inspected.out
