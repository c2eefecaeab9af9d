"""The table of schemes: sizes on disk against the layouts that the libraries write."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.schemes import scheme, table

OUT, IN = 4096, 14336


@pytest.mark.parametrize(
    ("name", "weight", "compressed_tensors", "quark"),
    [
        ("ptpc_fp8", OUT * IN, OUT * 2, OUT * 4),
        ("fp8", OUT * IN, 2 + 2, 4 + 4),
        ("fp8_block", OUT * IN, (OUT // 128) * (IN // 128) * 2, None),
        ("mxfp4", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_weight_only", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_fp8", OUT * IN // 2, None, OUT * IN // 32 + 4),
    ],
)
def test_sizes(name: str, weight: int, compressed_tensors: int | None, quark: int | None) -> None:
    row = scheme(name)
    assert row.weight_bytes(OUT, IN) == weight
    for layout, expected in (("compressed-tensors", compressed_tensors), ("quark", quark)):
        if expected is None:
            assert layout not in row.formats
            with pytest.raises(KeyError):
                row.scale_bytes(layout, OUT, IN)
        else:
            assert row.scale_bytes(layout, OUT, IN) == expected


def test_a_block_that_is_cut_off_has_a_scale_too() -> None:
    assert scheme("fp8_block").scale_count(200, 256) == 2 * 2


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
    assert scheme("fp8").refusal("stream") == "engine stream does not make fp8 yet" or "stream" in scheme("fp8").engines
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
