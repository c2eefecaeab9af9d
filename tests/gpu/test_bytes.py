"""What a GPU computes is what a CPU computes, byte for byte: a store may be filled by either."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.quantize import rounding
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, Written, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq import columns, solver
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import amax, fp8_scale
from quantmint.pipeline.store.disk import sha256_of
from tests.bench.model import SHAPES, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ROOT = Path(__file__).parents[2]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_the_same_bytes_on_both(name: str, dtype: torch.dtype) -> None:
    kernel, generator = KERNELS[name], torch.Generator().manual_seed(0)
    for power in range(-12, 13, 3):
        weight = (torch.randn(2048, 1024, generator=generator) * 2.0**power).to(dtype)
        on_cpu = kernel.compute(weight, amax(weight) if kernel.whole else None)
        there = weight.cuda()
        on_gpu = kernel.compute(there, amax(there) if kernel.whole else None)
        for role, expected in on_cpu.items():
            assert torch.equal(raw(expected), raw(on_gpu[role])), (role, power)


def test_every_bfloat16_magnitude_gets_the_same_scale_on_both() -> None:
    every = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(raw(fp8_scale(every)), raw(fp8_scale(every.cuda())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "e4m3"])
def test_inputs_are_rounded_to_the_same_numbers_on_both(element: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-130, 15, (64, 512, 1), generator=generator)
    numbers = torch.randn(64, 512, 96, generator=generator).mul(sizes).to(dtype)
    for scales in ("even", "up"):
        found = rounding.round_mx(numbers.cuda(), element, scales)  # type: ignore[arg-type]
        assert torch.equal(found.cpu(), rounding.round_mx(numbers, element, scales))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "ptpc_fp8", "w4a16"])
def test_the_kernel_rounds_columns_as_well_as_its_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, generator = KERNELS[name], torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 384, generator=generator) @ torch.randn(384, 384, generator=generator)
    factor = solver.factorize((inputs.t() @ inputs).cuda(), kernel)
    weight = torch.randn(200, 384, generator=generator).bfloat16().cuda()
    assert kernel.grid is not None
    assert columns._kernel(max(kernel.grid.group, 32), kernel.grid, weight.device) is not None
    made = solver.round_weight(weight, factor, kernel)
    columns._recorded.cache_clear()
    monkeypatch.setattr(columns, "gpu_kernel", lambda *_args, **_defined: None)
    other = solver.round_weight(weight, factor, kernel)
    columns._recorded.cache_clear()
    same = torch.cat([(made.parts[role] == other.parts[role]).flatten() for role in made.parts])
    assert same.float().mean() > 0.95  # sums in another order move some number over a boundary, and others with it
    assert made.after == pytest.approx(other.after, rel=0.01)


@pytest.mark.parametrize("kernel", ["mxfp4", "mxfp6_e3m2", "ptpc_fp8", "w4a16"])
def test_a_block_of_columns_at_once_gives_what_its_kernels_give_one_by_one(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 384, generator=generator) @ torch.randn(384, 384, generator=generator)
    factor = solver.factorize((inputs.t() @ inputs).cuda(), KERNELS[kernel])
    weights = [torch.randn(rows, 384, generator=generator).bfloat16().cuda() for rows in (64, 200, 64)]
    with torch.inference_mode():
        made = [solver.round_weight(weight, factor, KERNELS[kernel]) for weight in weights]
    monkeypatch.setattr(columns, "_replay_block", columns._round_block)
    for weight, one in zip(weights, made, strict=True):
        other = solver.round_weight(weight, factor, KERNELS[kernel])
        assert one.after < one.before
        assert all(torch.equal(raw(one.parts[role]), raw(other.parts[role])) for role in other.parts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:0,cuda:1", "cuda:1,cuda:0")])
def test_another_gpu_makes_what_the_first_one_does(devices: tuple[str, str], tmp_path: Path) -> None:
    options = "--scheme mxfp4 --algorithm gptq --calibration tiny --samples 16 --sequence-length 48 --batch-size 4"
    digests = []
    for device in devices:
        command = [sys.executable, "-m", "quantmint", "quantize", "recipes/tiny/model", str(tmp_path / device)]
        subprocess.run([*command, *options.split(), "--device", device], check=True, cwd=ROOT, timeout=300)
        digests.append({path.name: sha256_of(path) for path in (tmp_path / device).glob("*.safetensors")})
    assert digests[0] == digests[1]


def test_the_library_rounds_otherwise_on_a_gpu_than_on_a_cpu_and_ours_does_not() -> None:
    """compressed-tensors 0.19: the scales are the same on both, three in a hundred weights are a step apart."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    by_row = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    ours = KERNELS["ptpc_fp8"].compute(weight, None)
    differ = []
    for device in ("cpu", "cuda"):
        there = weight.to(device)
        scale, _ = utils.calculate_qparams(there.amin(1, keepdim=True), there.amax(1, keepdim=True), by_row)
        stored = forward.quantize(there, scale, None, by_row, dtype=torch.float8_e4m3fn)
        assert torch.equal(raw(scale), raw(ours["weight_scale"]))
        differ.append(int((raw(stored) != raw(ours["weight"])).sum()))
    assert differ[0] == 0
    assert differ[1] > 0


def written(source: Checkpoint, scheme: str, folder: Path, device: str) -> Written:
    """The checkpoint in this scheme, as this device computes it."""
    structure = read_structure(source.folder, source.tensors)
    choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, False)
    return write_checkpoint(
        CheckpointPlan(
            source,
            plan_shards(source, structure, choice, "compressed-tensors", shared_scales=True),
            choice,
            {f"{module}.input_scale": 3.0 for module in structure.linear} if scheme == "fp8" else {},
            checkpoint_format="compressed-tensors",
        ),
        folder,
        manifest=folder.with_suffix(".jsonl"),
        devices=(device,),
    )


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "fp8_block", "mxfp4"])
def test_a_checkpoint_has_the_same_bytes_on_both(models: Callable[..., Path], scheme: str, tmp_path: Path) -> None:
    source = open_checkpoint(models("llama", sharded=True))
    files = []
    for name, device in (("cpu", "cpu"), ("gpu", "cuda:0")):
        written(source, scheme, tmp_path / name, device)
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert files[0] == files[1]


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "mxfp4"])
def test_weights_of_real_size_have_the_same_bytes_every_time(scheme: str, tmp_path: Path) -> None:
    """Copies of 32 MiB take long enough to be read before they are there; those of a tiny model do not."""
    write_model(tmp_path / "model", SHAPES["8b"], layers=3, shards=4)
    source = open_checkpoint(tmp_path / "model")
    digests = []
    for number, device in enumerate(("cpu", "cuda:0", "cuda:0", "cuda:0")):
        folder = tmp_path / f"{number}"
        digests.append({shard.name: shard.sha256 for shard in written(source, scheme, folder, device).shards})
        on_disk = {path.name: sha256_of(path) for path in folder.glob("*.safetensors")}
        assert on_disk == digests[-1]  # what was hashed is what was written
        shutil.rmtree(folder)
    assert digests[1:] == digests[:1] * 3


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "mxfp4"])
def test_an_inspection_finds_the_same_on_both(scheme: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source", SHAPES["tiny"], 2, 1)
    source = open_checkpoint(tmp_path / "source")
    structure = read_structure(source.folder, source.tensors)
    choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, False)
    plans, made = plan_shards(source, structure, choice, "compressed-tensors"), tmp_path / "made"
    ranges = {f"{module}.input_scale": 3.0 for module in structure.linear}
    log = tmp_path / "manifest"
    write_checkpoint(
        CheckpointPlan(source, plans, choice, ranges, checkpoint_format="compressed-tensors"), made, manifest=log
    )
    checkpoint = open_checkpoint(made)
    here, there = (inspect_checkpoint(checkpoint, structure, source=source, device=d) for d in ("cpu", "cuda:0"))
    assert here.passed
    assert there.passed
    assert len(here.layers) == 14
    for one, other in zip(here.layers, there.layers, strict=True):
        assert other.sqnr_db == pytest.approx(one.sqnr_db, abs=1e-4)


def test_rows_that_are_rounded_some_at_a_time_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = torch.randn(2048, 1024, generator=generator, device="cuda")
    factor = solver.factorize(inputs.t() @ inputs, KERNELS["mxfp4"])
    weight = torch.randn(640, 1024, generator=generator, device="cuda").bfloat16()
    with torch.inference_mode():
        whole = solver.round_weight(weight, factor, KERNELS["mxfp4"])
        monkeypatch.setattr(solver, "ROUNDED_AT_A_TIME", 256 * 1024)
        parts = solver.round_weight(weight, factor, KERNELS["mxfp4"])
    assert {role: part.shape for role, part in parts.parts.items()} == {
        role: part.shape for role, part in whole.parts.items()
    }
    assert parts.after == pytest.approx(whole.after, rel=1e-4)
