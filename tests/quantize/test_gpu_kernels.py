"""The GPU kernels' own source, compiled for this processor, gives what PyTorch's operations give.

`tests/gpu/test_bytes.py` holds them to it on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.pipeline.quantize import rounding
from quantmint.pipeline.quantize.gptq import columns
from quantmint.pipeline.quantize.gpu import kernels
from quantmint.pipeline.quantize.schemes.registry import KERNELS

HEADER = Path(__file__).with_name("host.h")
LAUNCH = """
extern "C" void launch(int threads, int weights, {parameters}) {{
    blockDim.x = 1;
    for (blockIdx.y = 0; blockIdx.y < weights; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < threads; ++blockIdx.x) {name}({names});
}}
"""
PARAMETERS = {"round_mx": "vvi", "round_group": "vvvvvvvii"}
TYPES = {"v": ctypes.c_void_p, "i": ctypes.c_int}


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran, in order; they run on this processor."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    ran: list[str] = []

    def gpu_kernel(name: str, _device: torch.device, **defined: str | float) -> Callable[..., None]:
        source = Path(kernels.__file__).with_name(f"{name}.cu")
        kinds = PARAMETERS[name]
        types = {"v": "void*", "i": "int"}
        parameters = ", ".join(f"{types[kind]} a{number}" for number, kind in enumerate(kinds))
        declared = source.read_text().split(f"{name}(", 1)[1].split(")", 1)[0].split(",")
        names = [f"({one.rsplit(None, 1)[0]})a{number}" for number, one in enumerate(declared)]
        text = "\n".join([f"#define {key} {value}" for key, value in defined.items()])
        text += f'\n#include "{HEADER}"\n#include "{source}"\n'
        text += LAUNCH.format(parameters=parameters, name=name, names=", ".join(names))
        made = tmp_path / f"{name}-{abs(hash(text))}.so"
        if not made.exists():
            made.with_suffix(".cpp").write_text(text)
            order = ["g++", "-O1", "-w", "-shared", "-fPIC", "-o", made, made.with_suffix(".cpp")]
            subprocess.run(order, check=True, capture_output=True)
        function = ctypes.CDLL(str(made)).launch

        def launch(threads: int, weights: int, arguments: list[Any]) -> None:
            ran.append(name)
            given = [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
            function(threads, weights, *(TYPES[kind](value) for kind, value in zip(kinds, given, strict=True)))

        return launch

    monkeypatch.setattr(rounding, "gpu_kernel", gpu_kernel)
    monkeypatch.setattr(columns, "gpu_kernel", gpu_kernel)
    return ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2"])
def test_inputs_are_rounded_to_the_same_numbers(
    element: str, dtype: torch.dtype, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-130, 15, (3, 512, 1), generator=generator)
    numbers = torch.randn(3, 512, 64, generator=generator).mul(sizes).to(dtype)
    numbers[0, :2] = 0
    # Numbers on the boundaries between two values, and between two scales.
    numbers[1] = (torch.arange(512 * 64).view(512, 64) % 257 / 16).to(dtype)
    made = [rounding.round_mx(numbers, element, scales) for scales in ("even", "up")]
    assert launches == ["round_mx"] * 2
    monkeypatch.undo()
    for found, scales in zip(made, ("even", "up"), strict=True):
        expected = rounding.round_mx(numbers, element, scales)  # type: ignore[arg-type]
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", [(), (3,)])
@pytest.mark.parametrize("kernel", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "w4a16", "ptpc_fp8"])
def test_a_group_of_columns_is_rounded_to_the_same_numbers(
    kernel: str, weights: tuple[int, ...], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, generator = KERNELS[kernel].grid, torch.Generator().manual_seed(0)
    assert grid is not None
    count, rows = max(grid.group, 32), 40

    # Small multiples of powers of two: no order of sums rounds them.
    def drawn(*shape: int, least: int, most: int, unit: float) -> torch.Tensor:
        return torch.randint(least, most, (*weights, *shape), generator=generator).float() * unit

    weight = drawn(count, rows, least=-64, most=65, unit=1 / 16)
    target = weight + drawn(count, rows, least=-4, most=5, unit=1 / 16)
    reach = drawn(count, count, least=-1, most=2, unit=1 / 8).triu(1).mT.contiguous()
    price = drawn(count, least=1, most=9, unit=1.0)
    scales = None if grid.group > 1 else torch.ones(*weights, 1, rows)
    if kernel == "w4a16":  # whose own scales are no powers of two
        scales = torch.full((*weights, 1, rows), 0.5)
    given = weight, target, reach, price, scales, grid, torch.bfloat16
    found = columns._round_group(*given)
    assert launches == ["round_group"]
    monkeypatch.undo()
    expected = columns._round_group(*given)
    assert found[0].shape == expected[0].shape
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])
    assert len(found[0].unique()) > 10


def test_without_a_compiler_pytorch_does_the_work_and_a_warning_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    kernels._compiled.cache_clear()
    device = torch.device("cuda:0")
    assert [kernels.gpu_kernel("round_mx", device, DIGITS=7) for _ in range(2)] == [None, None]
    kernels._compiled.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "round_mx cannot be compiled (libnvrtc.so: cannot open" in caplog.text
    assert kernels.gpu_kernel("round_mx", torch.device("cpu")) is None
