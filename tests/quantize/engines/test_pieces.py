"""However a weight is cut and whoever computes the pieces, the bytes are those of the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.quantize.engines.stream import schedule
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import amax

NAMES = ("self_attn.k_proj", "mlp.up_proj", "self_attn.q_proj", "mlp.gate_proj", "self_attn.v_proj", "mlp.down_proj")
ROWS = (1, 127, 128, 129, 384, 391)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("step", [1, 3, 128])
def test_a_kernel_computes_rows_apart_from_all_others(name: str, rows: int, step: int) -> None:
    kernel = KERNELS[name]
    weight = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight[0] = 0
    largest = amax(weight) if kernel.whole else None
    step *= kernel.rows
    parts = [kernel.compute(weight[start : start + step], largest) for start in range(0, rows, step)]
    for role, expected in kernel.compute(weight, None).items():
        found = parts[-1][role] if kernel.whole and expected.ndim == 0 else torch.cat([part[role] for part in parts])
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), role


@pytest.fixture
def uneven(tmp_path: Path, write_model: Callable[..., Checkpoint]) -> Checkpoint:
    """Two files of weights with awkward numbers of rows, between tensors that are carried over."""
    shards = {
        f"model-{layer + 1:05}-of-00002.safetensors": {
            f"model.layers.{layer}.norm.weight": ("BF16", (320,)),
            **{f"model.layers.{layer}.{name}.weight": ("BF16", (r, 320)) for name, r in zip(NAMES, ROWS, strict=True)},
            f"model.layers.{layer}.odd": ("F32", (77, 13)),
        }
        for layer in range(2)
    }
    return write_model(tmp_path / "uneven", shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shared_scales"),
    [
        ("ptpc_fp8", False),
        ("fp8", False),
        ("fp8", True),
        ("fp8_block", False),
        ("mxfp4", True),
        ("nvfp4_weight_only", False),
    ],
)
def test_sizes_of_pieces_workers_and_devices_change_nothing(
    run: Callable[..., dict[str, bytes]],
    uneven: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    shared_scales: bool,
) -> None:
    modules = [name.removesuffix(".weight") for name in uneven.tensors if name.endswith("_proj.weight")]
    ranges = {f"{module}.input_scale": 3.0 for module in modules} if scheme == "fp8" else None
    results = []
    ways = [(1 << 30, 1, 1), (1, 1, 1), (700, 2, 1), (100_000, 3, 2), (50_000, 16, 1)]
    for number, (piece, cores, devices) in enumerate(ways):
        monkeypatch.setattr(schedule, "CPU_PIECE", piece)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        work = tmp_path / str(number)
        options = {"scheme": scheme, "ranges": ranges, "shared_scales": shared_scales, "devices": ("cpu",) * devices}
        results.append(run(uneven, work, **options))
    assert all(result == results[0] for result in results)
