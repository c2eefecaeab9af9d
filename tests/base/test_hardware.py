"""Figures of accelerators that the planner uses, and the lookup of a row by a driver's name."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import (
    by_name,
    by_pci,
    cautions,
    hardware,
    local_cpu_flags,
    native_on,
    needs,
    refusal,
    table,
)

GPUS = [row for row in table().values() if row.arch]


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_a_gpu_has_its_figures(row):
    assert row.hbm_gib
    assert row.bytes_per_second / 1e12 in (3.35, 4.8, 5.3, 6.0, 8.0)
    assert row.flops("e4m3") == pytest.approx(2 * row.flops("bf16"), rel=1e-4)
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


def test_hardware_facts():
    assert set(table()) == {"mi300x", "mi325x", "mi350x", "mi355x", "cpu", "cuda", "h100", "h200"}
    assert hardware("mi300x").hbm_bytes == 192 << 30
    assert hardware("cpu").hbm_bytes is None
    with pytest.raises(UserError, match="expected one of mi300x"):
        hardware("mi299x")


@pytest.mark.parametrize(
    ("name", "scheme", "kv_cache", "flags", "expected"),
    [
        ("cpu", "fp8", "auto", None, "static_scaled_fp8_quant"),
        ("cpu", "mxfp4", "auto", None, "no kernel for MXFP4"),
        ("cpu", "fp8_block", "auto", {"avx512f"}, "AMX"),
        ("cpu", "fp8_block", "auto", {"amx_tile"}, None),
        ("cpu", "fp8_block", "auto", None, None),
        ("cpu", "ptpc_fp8", "fp8", {"avx2"}, "AVX-512"),
        ("cpu", "ptpc_fp8", "fp8", {"avx512f"}, None),
        ("cpu", "w4a16", "auto", {"avx2"}, "AVX-512"),
        ("cpu", "w4a16", "auto", {"avx512f"}, None),
        ("cpu", "int8_w8a8", "auto", {"avx2"}, None),
        ("cpu", "bf16", "auto", {"avx2"}, None),
        ("mi300x", "mxfp4", "fp8", None, None),
        ("cuda", "fp8", "fp8", None, None),
    ],
)
def test_checkpoints_that_vllm_cannot_load_are_refused(name, scheme, kv_cache, flags, expected):
    found = refusal(name, scheme, kv_cache, "quark", cpu_flags=flags)
    assert found is None if expected is None else expected in (found or "")


@pytest.mark.parametrize(
    ("name", "scheme", "flags", "expected"),
    [
        ("cpu", "ptpc_fp8", {"amx_tile"}, "blocks only"),
        ("cpu", "fp8_block", {"avx512f"}, "AMX tiles only"),
        ("cpu", "int8_w8a8", {"avx512f"}, "AMX tiles only"),
        ("cpu", "w4a16", {"avx512f"}, "AMX tiles only"),
        ("cpu", "int8_w8a8", {"amx_tile"}, None),
        ("mi300x", "ptpc_fp8", None, None),
    ],
)
def test_experts_that_do_not_load_are_refused(name, scheme, flags, expected):
    reason = refusal(name, scheme, "auto", "compressed-tensors", expert_schemes=[scheme], cpu_flags=flags)
    assert reason is None if expected is None else expected in (reason or "")
    assert "runtime: reference" in (reason or "runtime: reference")


def test_checkpoints_that_load_with_restrictions_get_cautions():
    assert "may clip" in cautions("mi300x", "ptpc_fp8", "fp8", "compressed-tensors")[0]
    assert cautions("mi300x", "ptpc_fp8", "fp8", "quark") == ()
    assert cautions("mi355x", "ptpc_fp8", "fp8", "compressed-tensors") == ()
    assert "truncate" in cautions("cpu", "ptpc_fp8", "fp8", "quark", cpu_flags={"avx512f"})[0]
    assert "amd-quark" in cautions("mi325x", "mxfp4", "auto", "quark")[0]
    assert cautions("mi355x", "mxfp4", "auto", "quark") == ()
    assert "emulates" in cautions("mi355x", "mxfp4_fp8", "auto", "quark")[0]
    assert "the CPU must have" in cautions("cpu", "fp8_block", "auto", "compressed-tensors")[0]
    assert cautions("cpu", "fp8_block", "auto", "compressed-tensors", cpu_flags={"amx_tile"}) == ()


def test_schemes_multiplied_in_their_stored_formats():
    assert native_on("ptpc_fp8") == ("mi300x", "mi325x", "mi350x", "mi355x", "cuda")
    assert native_on("mxfp4") == ("mi350x", "mi355x")
    assert native_on("w4a16") == ()


def test_rules_name_facts_that_exist():
    document = yaml.safe_load(resources.files("quantmint.pipeline.base").joinpath("hardware.yaml").read_text())
    for rule in document["refusals"] + document["cautions"] + document["native"]:
        assert set(rule["when"]) <= {"hardware", "kind", "arch", "scheme", "kv_cache", "format", "expert_schemes"}
        assert set(rule["when"].get("arch", [])) <= {"gfx942", "gfx950"}
        assert set(rule.get("needs", [])) <= {"amd-quark"}
    flags = local_cpu_flags()
    assert flags is None or len(flags) > 5
