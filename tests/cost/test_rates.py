"""Whose rates are taken: probed, of the table, or borrowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cost.rates import Identity, identify, known, rates_for, remember
from pipeline.cost.volume import CARRIED
from pipeline.engines.stream.kernels import KERNELS

HERE = Identity(processor="Some CPU", cores=2, device="cpu", torch="2.13.0", filesystem="ext4")


@pytest.mark.parametrize(
    ("change", "machine", "origin"),
    [
        ({}, "two-cores", "table"),
        ({"cores": 64}, "two-cores", "borrowed"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "h100", "table"),
        ({"device": "AMD Instinct MI300X"}, "h100", "borrowed"),
    ],
)
def test_a_machine_that_nobody_probed(tmp_path: Path, change: dict[str, object], machine: str, origin: str) -> None:
    assert rates_for(replace(HERE, **change), tmp_path) == (known(machine), origin)


def test_what_was_probed_is_this_machine_s_alone(tmp_path: Path) -> None:
    probed = replace(known("two-cores"), machine="here", read=1.0)
    remember(HERE, probed, tmp_path)
    assert rates_for(HERE, tmp_path) == (probed, "probed")
    for other in (replace(HERE, torch="2.14.0"), replace(HERE, filesystem="xfs"), replace(HERE, cores=3)):
        assert rates_for(other, tmp_path)[1] != "probed"
    remember(replace(HERE, cores=3), replace(probed, machine="there"), tmp_path)
    assert rates_for(HERE, tmp_path) == (probed, "probed")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}'])
def test_a_memory_that_cannot_be_read_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine-rates.json").write_text(text)
    assert rates_for(HERE, tmp_path)[1] == "table"
    remember(HERE, known("two-cores"), tmp_path)
    assert rates_for(HERE, tmp_path)[1] == "probed"


@pytest.mark.parametrize("name", ["two-cores", "h100"])
def test_the_table_knows_every_kernel(name: str) -> None:
    rates = known(name)
    assert set(rates.kernels) == {*KERNELS, CARRIED}
    assert rates.kernel("nobody has measured this") == min(rates.kernels.values())
    assert (rates.link is None) == (rates.device_kind == "cpu")


def test_this_machine_says_who_it_is(tmp_path: Path) -> None:
    found = identify("cpu", tmp_path / "not" / "there")
    assert found == identify("cpu", tmp_path)
    assert found.cores > 0
    assert found.filesystem != "unknown"
    assert found.device == "cpu"
