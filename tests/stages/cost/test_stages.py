"""Predictions are sane beside each other; what they are in seconds is the machine's affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from quantmint.pipeline.stages.cost import (
    CalibrateVolume,
    MachineCapacity,
    QuantizeVolume,
    calibrate_cost,
    quantize_cost,
)
from quantmint.pipeline.stages.rates import known

Quantized = Callable[[str, str], QuantizeVolume]
Calibrated = Callable[..., CalibrateVolume]

CPU = MachineCapacity(known("two-cores"), 2, 24 << 30, ("cpu",), 24 << 30)
GPU = MachineCapacity(known("h100"), 16, 128 << 30, ("cuda:0",), 80 << 30)
MACHINES = pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])


@MACHINES
@pytest.mark.parametrize("scheme", ["fp8", "ptpc_fp8", "fp8_block", "mxfp4"])
def test_larger_models_take_longer_and_no_more_memory(
    quantized: Quantized, machine: MachineCapacity, scheme: str
) -> None:
    costs = [quantize_cost(quantized(name, scheme), machine) for name in ("8b", "70b", "405b")]
    assert [cost.seconds for cost in costs] == sorted(cost.seconds for cost in costs)
    assert costs[1].memory == costs[2].memory, "a few pieces, whatever the model"
    assert costs[1].device_memory == costs[2].device_memory
    volumes = [quantized(name, scheme) for name in ("8b", "70b", "405b")]
    assert [cost.disk for cost in costs] == [volume.written for volume in volumes]


@MACHINES
def test_all_is_on_the_disk_after_it_is_written(quantized: Quantized, machine: MachineCapacity) -> None:
    cost = quantize_cost(quantized("8b", "ptpc_fp8"), machine)
    assert cost.seconds > cost.written >= max(cost.parts["hash"] / machine.cores, cost.parts.get("link", 0))
    assert cost.written <= sum(cost.parts.values()), "what overlaps takes no longer than one thing after the other"


def test_a_model_beyond_the_memory_is_read_from_the_disk(quantized: Quantized) -> None:
    cost = quantize_cost(quantized("8b", "ptpc_fp8"), replace(CPU, memory=16 << 30))
    assert "disk" in cost.parts
    assert "disk" not in quantize_cost(quantized("8b", "ptpc_fp8"), replace(CPU, memory=1 << 40)).parts


def test_a_model_that_memory_holds_is_not_read_from_the_disk(quantized: Quantized, calibrated: Calibrated) -> None:
    """141 GB of 16 bit beside 275 GB, where 71 GB that are written lie beside them; not beside 137 GB."""
    for memory, slower in ((256 << 30, False), (128 << 30, True)):
        machine, room = (replace(GPU, memory=size) for size in (memory, 1 << 40))
        assert ("disk" in quantize_cost(quantized("70b", "ptpc_fp8"), machine).parts) == slower
        volume = calibrated("70b", samples=64, sequence_length=512)
        assert (calibrate_cost(volume, machine).seconds > calibrate_cost(volume, room).seconds) == slower


def test_a_slow_part_bounds_the_whole(quantized: Quantized) -> None:
    volume = quantized("8b", "ptpc_fp8")
    for name, rates, bound in (
        ("link", replace(GPU.rates, link=1e8), "link"),
        ("compute", replace(GPU.rates, kernels={"ptpc_fp8": 1e8}), "device"),
        ("hash", replace(GPU.rates, hash=1e7), "hash"),
    ):
        cost = quantize_cost(volume, replace(GPU, rates=rates))
        assert cost.bound == bound
        assert cost.written >= cost.parts[name] / 4


@MACHINES
def test_calibration_is_resident_where_the_model_fits_and_its_hidden_states_are_large(
    calibrated: Calibrated, machine: MachineCapacity
) -> None:
    volume = calibrated("8b", samples=2048, sequence_length=512)
    room = replace(machine, memory=1 << 40, device_memory=1 << 40)
    tight = replace(machine, memory=1 << 40, device_memory=volume.need.weights)
    resident, layer = calibrate_cost(volume, room), calibrate_cost(volume, tight)
    assert (resident.mode, layer.mode) == ("resident", "layer")

    def held(machine: MachineCapacity) -> int:
        cost = calibrate_cost(volume, machine)
        return cost.memory if machine.rates.link is None else cost.device_memory

    assert held(room) > volume.need.weights > held(tight)


@MACHINES
def test_more_calibration_takes_longer(calibrated: Calibrated, machine: MachineCapacity) -> None:
    seconds = [
        calibrate_cost(calibrated(name, samples=samples), machine).seconds
        for name, samples in (("8b", 128), ("8b", 512), ("70b", 512), ("405b", 512))
    ]
    assert seconds == sorted(seconds)


def test_devices_share_the_work(quantized: Quantized, calibrated: Calibrated) -> None:
    two = replace(GPU, devices=("cuda:0", "cuda:1"), rates=replace(GPU.rates, kernels={"ptpc_fp8": 1e9}))
    one = replace(two, devices=("cuda:0",))
    volume = quantized("8b", "ptpc_fp8")
    assert quantize_cost(volume, two).written == pytest.approx(quantize_cost(volume, one).written / 2)
    batches = calibrated("8b", samples=512, sequence_length=512)
    assert calibrate_cost(batches, two).seconds < calibrate_cost(batches, one).seconds


def test_a_recipe_may_ask_for_a_mode(calibrated: Calibrated) -> None:
    room = replace(GPU, memory=1 << 40, device_memory=1 << 40)
    volume = calibrated("8b", samples=512, sequence_length=2048)
    assert calibrate_cost(replace(volume, mode="layer"), room).mode == "layer"
