"""Computed by chunks of rows, a weight is what it is as a whole."""

from __future__ import annotations

import pytest
import torch

from pipeline.engines.stream import kernels
from pipeline.engines.stream.kernels import KERNELS


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 384, 391])
@pytest.mark.parametrize("chunk", [1, 600, 70_000, 1 << 30])
def test_chunks_give_the_bytes_of_the_whole(name: str, rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CHUNK", chunk)
    weight = torch.randn(rows, 320, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight[0] = 0
    by_chunks, whole = KERNELS[name](weight), KERNELS[name].compute(weight)
    assert by_chunks.keys() == whole.keys()
    for role, expected in whole.items():
        assert by_chunks[role].dtype == expected.dtype
        assert by_chunks[role].shape == expected.shape
        found = by_chunks[role].reshape(-1).view(torch.uint8)
        assert torch.equal(found, expected.contiguous().reshape(-1).view(torch.uint8)), role
