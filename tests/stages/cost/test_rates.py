"""Whose rates are taken: of the table, or borrowed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from quantmint.pipeline.base.machine import Host, cpu_name
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.stages.cost import CARRIED
from quantmint.pipeline.stages.rates import known, measured, rates_for, rates_here


@pytest.mark.parametrize(
    ("device", "cores", "machine", "origin"),
    [
        ("cpu", 2, "two-cores", "table"),
        ("cpu", 64, "two-cores", "borrowed"),
        ("NVIDIA H100 80GB HBM3", 2, "h100", "table"),
        ("AMD Instinct MI300X", 2, "h100", "borrowed"),
    ],
)
def test_the_row_of_a_machine(device: str, cores: int, machine: str, origin: str) -> None:
    assert rates_for(device, cores) == (known(machine), origin)


@pytest.mark.parametrize("name", ["two-cores", "h100"])
def test_the_table_knows_every_kernel(name: str) -> None:
    rates = known(name)
    assert set(rates.kernels) == {*KERNELS, CARRIED}
    assert rates.kernel("nobody has measured this") == min(rates.kernels.values())
    assert (rates.link is None) == (rates.device_kind == "cpu")


def test_a_machine_that_the_table_does_not_know_is_measured_in_a_second() -> None:
    start = time.perf_counter()
    rates, origin = rates_here("cpu", 64)
    assert origin == "measured"
    assert time.perf_counter() - start < 10  # of a machine that others use as well
    like = known("two-cores")
    assert rates.machine.startswith("this machine (")
    assert like.machine in rates.machine
    assert (rates.hash, rates.flops) != (like.hash, like.flops)
    assert rates.write / like.write == pytest.approx(rates.read / like.read)
    assert rates.kernel("mxfp4") / rates.kernel("fp8") == pytest.approx(like.kernel("mxfp4") / like.kernel("fp8"))
    assert (rates.disk, rates.sync, rates.start) == (like.disk, like.sync, like.start)
    rates, origin = rates_here("cpu", 2)
    assert (replace(rates, machine=like.machine), origin) == (like, "table")
    assert rates.machine.startswith(cpu_name(Host())), "this machine's own name"
    assert rates.machine.endswith(f"taken for {like.machine}")


def test_where_nothing_can_be_measured_the_rates_stay_another_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("quantmint.pipeline.stages.rates.measured", fail)
    assert rates_here("cpu", 64) == (known("two-cores"), "borrowed")


def test_measuring_leaves_no_switch_behind() -> None:
    import torch

    before = torch.get_num_threads()
    measured(known("two-cores"), "cpu", "it")
    assert torch.get_num_threads() == before
