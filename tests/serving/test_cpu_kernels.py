"""The plugin of vLLM's CPU build: the kernel lets the process use tiles, and products in FP8 are PyTorch's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.serving import cpu_kernels

_PROGRAM = """
import torch
from quantmint.pipeline.serving import cpu_kernels

torch.manual_seed(0)
a = torch.randn(48, 64).to(torch.float8_e4m3fn)
b = torch.randn(32, 64).to(torch.float8_e4m3fn).t()
one, bias = torch.tensor([0.5]), torch.randn(32)

def near(first, second):
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)

scales = torch.rand(48, 1), torch.rand(1, 32)
cases = [(one, one, torch.float32, bias), (one, one, torch.bfloat16, None), (*scales, torch.float32, None)]
exact = [
    torch.mm(a.double() * x.double(), b.double() * y.double()) + (0 if z is None else z.double())
    for x, y, _, z in cases
]
cpu_kernels.replace_kernels()
for (x, y, dtype, z), expected in zip(cases, exact):
    given = dict(scale_a=x, scale_b=y, out_dtype=dtype, bias=z)
    product = torch._scaled_mm(a, b, **given)
    assert product.dtype == dtype
    near(product.double(), expected)
    out = torch.empty(0, dtype=dtype)
    assert torch.equal(torch._scaled_mm(a, b, **given, out=out), product)
from torch.profiler import profile
with profile() as seen:
    torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
assert "aten::mm" in {event.key for event in seen.key_averages()}, "the kernel is the plugin's"
print("done")
"""


def test_products_are_those_of_the_formula():
    """In a process of its own, because a kernel of PyTorch stays replaced."""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert ended.stdout == "done\n", ended.stderr


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("codes", [range(256), [*range(127), *range(128, 255)]], ids=["all", "finite"])
def test_elements_are_those_of_pytorch(dtype: torch.dtype, codes: Iterable[int]):
    elements = torch.tensor(list(codes), dtype=torch.uint8).view(dtype)
    numbers, power = cpu_kernels.to_float32(elements)
    torch.testing.assert_close(numbers * power, elements.float(), rtol=0, atol=0, equal_nan=True)
    zeros = numbers == 0
    assert torch.equal(numbers[zeros].signbit(), elements.float()[zeros].signbit())


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("fpu sse avx2", True),
        ("fpu avx512f amx_bf16 amx_tile amx_int8", True),  # Sapphire Rapids
        ("fpu avx512f amx_bf16 amx_tile amx_int8 amx_fp16", False),  # Granite Rapids
    ],
)
def test_it_is_for_processors_without_fp16_tiles(tmp_path: Path, flags: str, needed: bool):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: a processor\nflags\t\t: {flags}\n")
    assert cpu_kernels.lacks_fp8(cpu_kernels.flags(cpuinfo)) is needed
    assert not cpu_kernels.flags(tmp_path / "none")


_TILES = """
import ctypes
from pathlib import Path
from quantmint.pipeline.serving import cpu_kernels

def may_use_tiles():
    granted = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted)) == 0  # arch_prctl, ARCH_GET_XCOMP_PERM
    return bool(granted.value >> 18 & 1)  # XTILEDATA

before = may_use_tiles()
cpu_kernels.register()
print(before, may_use_tiles())
"""


@pytest.mark.skipif("amx_tile" not in cpu_kernels.flags(Path("/proc/cpuinfo")), reason="this processor has no AMX")
def test_the_process_may_use_tiles():
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", _TILES], cwd=root, capture_output=True, text=True, check=False)
    assert ended.stdout == "False True\n", ended.stderr
