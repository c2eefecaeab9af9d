"""Whose rates are taken: of the table, or borrowed."""

from __future__ import annotations

import pytest

from pipeline.quantize.engines.stream.kernels import KERNELS
from pipeline.stages.cost import CARRIED, known, rates_for


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
