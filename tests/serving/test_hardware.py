"""Figures of the accelerators that the planner counts with, and how a driver's name leads to a row."""

from __future__ import annotations

import pytest

from pipeline.commands.recipes import scheme_rows
from pipeline.serving.hardware import by_name, by_pci, hardware, needs, table

GPUS = [row for row in table().values() if row.arch]


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_a_gpu_has_its_figures(row):
    assert all((row.hbm_gib, row.memory_tb_s, row.compute_units, row.links, row.links_gb_s))
    assert set(row.tflops) == {"bf16", "fp8"} | ({"mxfp4"} if row.native_mx else set())
    assert row.tflops["fp8"] == pytest.approx(2 * row.tflops["bf16"], rel=1e-4)
    assert row.kind != "rocm" or row.pci
    assert hash(row) == hash(hardware(row.name))


def test_each_id_and_each_name_belongs_to_one_row():
    ids = [identity for row in table().values() for identity in row.pci]
    names = [name for row in table().values() for name in (row.title, *row.names)]
    assert len(set(ids)) == len(ids)
    assert len(set(names)) == len(names)
    assert all(by_pci(int(identity, 16)) is row for row in table().values() for identity in row.pci)
    assert all(by_name(name) is row for row in GPUS for name in (row.title, *row.names))


def test_unknown_devices_have_no_row():
    assert by_pci(0x74A2) is None
    assert by_name("AMD Instinct MI250X") is None
    assert by_name("NVIDIA H100") is hardware("h100")
    assert by_name("NVIDIA H1000") is None
    assert by_name("NVIDIA H200 NVL") is hardware("h200")
    assert by_name("CPU") is None


def test_cpu_and_cuda_leave_figures_to_the_machine():
    for name in ("cpu", "cuda"):
        row = hardware(name)
        assert (row.hbm_bytes, row.memory_tb_s, row.links_gb_s, dict(row.tflops)) == (None, None, None, {})


def test_links_of_a_node():
    assert hardware("mi300x").links_gb_s == 896
    assert hardware("mi355x").links_gb_s == pytest.approx(1075.2)


@pytest.mark.parametrize(
    ("name", "scheme", "expected"),
    [
        ("mi300x", "mxfp4", ("amd-quark",)),
        ("mi355x", "mxfp4", ()),
        ("mi355x", "mxfp4_fp8", ("amd-quark",)),
        ("mi355x", "mxfp6_e2m3", ("amd-quark",)),
        ("mi300x", "ptpc_fp8", ()),
        ("cuda", "mxfp4_weight_only", ("amd-quark",)),
        ("h100", "mxfp4_weight_only", ("amd-quark",)),
        ("cpu", "ptpc_fp8", ()),
    ],
)
def test_emulation_needs_quark(name, scheme, expected):
    assert needs(name, scheme, "auto", "quark") == expected


def test_the_table_of_schemes_names_cuda_once():
    assert not {"h100", "h200"} & {name for row in scheme_rows() for name in row.native}
