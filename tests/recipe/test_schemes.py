"""The table of schemes: sizes on disk against the layouts that the libraries write."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.formats.tensors import stores, weight_tensors
from pipeline.schemes import scheme, table

OUT, IN = 4096, 14336


@pytest.mark.parametrize(
    ("name", "weight", "compressed_tensors", "quark"),
    [
        ("ptpc_fp8", OUT * IN, OUT * 2, OUT * 2),
        ("fp8", OUT * IN, 2 + 2, 2 + 2),
        ("fp8_block", OUT * IN, (OUT // 128) * (IN // 128) * 2, None),
        ("mxfp4", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_weight_only", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_fp8", OUT * IN // 2, None, OUT * IN // 32 + 2),
    ],
)
def test_each_format_holds_a_scheme_in_so_many_bytes(
    name: str, weight: int, compressed_tensors: int | None, quark: int | None
) -> None:
    for layout, scales in (("compressed-tensors", compressed_tensors), ("quark", quark)):
        assert (layout in scheme(name).formats) == stores(layout, name) == (scales is not None)
        if scales is not None:
            tensors = weight_tensors(layout, name, "m", (OUT, IN), "BF16")
            assert sum(tensor.nbytes for tensor in tensors) == weight + scales


def test_a_block_that_is_cut_off_has_a_scale_too() -> None:
    (scale,) = (
        t for t in weight_tensors("compressed-tensors", "fp8_block", "m", (200, 256), "BF16") if t.role != "weight"
    )
    assert scale.shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "divisor", "bits", "ranges", "mx"),
    [
        ("ptpc_fp8", 1, 8.0, False, False),
        ("fp8", 1, 8.0, True, False),
        ("fp8_block", 128, 8 + 16 / 128**2, False, False),
        ("mxfp4", 32, 4.25, False, True),
        ("mxfp4_weight_only", 32, 4.25, False, True),
        ("mxfp4_fp8", 32, 4.25, True, True),
    ],
)
def test_properties(name: str, divisor: int, bits: float, ranges: bool, mx: bool) -> None:
    row = scheme(name)
    assert (row.input_divisor, row.bits_per_weight, row.needs_ranges, row.is_mx) == (divisor, bits, ranges, mx)


def test_refusals_say_what_is_missing() -> None:
    assert scheme("ptpc_fp8").refusal("stream") is None
    assert scheme("fp8").refusal("llmcompressor") == "engine llmcompressor does not make fp8 yet"
    assert scheme("fp8_block").refusal("quark") == "engine quark has no fp8_block"


def test_rows_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme("fp8").name = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        table()["x"] = scheme("fp8")  # type: ignore[index]
    assert all(name == row.name for name, row in table().items())
    assert len({hash(row) for row in table().values()}) == len(table())


def test_no_engine_is_both_there_and_planned() -> None:
    for row in table().values():
        assert not set(row.engines) & set(row.planned)
        assert set(row.engines) | set(row.planned) <= {"stream", "llmcompressor", "quark"}
