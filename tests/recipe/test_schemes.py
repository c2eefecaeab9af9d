"""The table of schemes: sizes on disk against the layouts that the libraries write."""

from __future__ import annotations

import pytest

from quantmint.pipeline.base.schemes import WRITES, scheme, table
from quantmint.pipeline.quantize.formats.layout import stores, weight_tensors

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
        ("mxfp6_e2m3", OUT * IN * 3 // 4, None, OUT * IN // 32),
        ("mxfp6_e3m2", OUT * IN * 3 // 4, None, OUT * IN // 32),
        ("mxfp8", OUT * IN, OUT * IN // 32, None),
        ("int8_w8a8", OUT * IN, OUT * 2, OUT * 2 + OUT),
        ("w4a16", OUT * IN // 2, OUT * IN // 128 * 2 + 16, OUT * IN // 128 * 2 + OUT * IN // 256),
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


def test_every_layout_is_there_or_refused_with_a_reason() -> None:
    for row in table().values():
        assert {*row.formats, *dict(row.refused)} == {"compressed-tensors", "quark"}
        assert not {*row.formats} & {*dict(row.refused)}
        assert all(row.makers(layout) for layout in row.formats), row.name
        assert set(row.engines) <= set(WRITES)
