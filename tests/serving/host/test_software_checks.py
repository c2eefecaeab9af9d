"""Looks at the serving environment: which vLLM, built for what, and with what beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.machine import Machine
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.host.subject import Wanted, installed
from tests.serving.host import trees
from tests.serving.host.trees import machine

MX = Wanted("mxfp4", "fp8", "quark")


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.19.0", "ok"),
        ("0.33.1+rocm711", "ok"),
        ("0.23.1.dev3+gabc", "ok"),
        ("0.34.0", "warn"),
        ("0.18.2", "fail"),
        ("main", "warn"),
        (None, "fail"),
    ],
)
def test_versions(tmp_path: Path, finding, version: str | None, status: str):
    versions = {} if version is None else {"vllm": version}
    seen = finding("vllm", machine(trees.healthy(tmp_path), installed=versions))
    assert (seen.status, seen.expected) == (status, "0.19 to 0.33")
    assert bool(seen.fix) == (status != "ok")


def test_no_environment(tmp_path: Path, finding):
    absent = finding("vllm", machine(trees.healthy(tmp_path)), vllm=tmp_path / "none")
    assert (absent.status, "QUANTMINT_VLLM" in absent.fix) == ("fail", True)
    assert finding("vllm build", machine(tmp_path), vllm=tmp_path / "none").status == "skipped"


@pytest.mark.parametrize(
    ("torch", "status", "found"),
    [
        ({"hip": "7.0.51831", "cuda": None}, "ok", "built for ROCm (torch 2.10.0+git1234567)"),
        ({"rocm": "7.2.0", "hip": None}, "ok", "built for ROCm (torch 2.10.0+git1234567)"),
        ({"hip": None, "cuda": "13.0"}, "fail", "built for CUDA (torch 2.10.0+git1234567)"),
        ({"hip": None, "cuda": None, "debug": False}, "fail", "built for a CPU (torch 2.10.0+git1234567)"),
        ({}, "fail", "{python} has no torch"),
    ],
)
def test_builds(tmp_path: Path, finding, vllm: Path, torch: dict[str, str | None], status: str, found: str):
    seen = finding("vllm build", machine(trees.instinct(tmp_path), torch=torch))
    assert (seen.status, seen.found) == (status, found.format(python=vllm.parent / "python"))
    assert seen.expected == "built for ROCm"


def test_quark_where_mx_is_emulated(tmp_path: Path, finding, vllm: Path):
    old, new = (machine(trees.instinct(tmp_path / "old")), machine(trees.mi355x(tmp_path / "new")))
    seen = finding("amd-quark", old, wanted=MX)
    assert (seen.status, seen.found) == ("fail", "amd-quark is not there")
    assert seen.fix == f"{vllm.parent / 'python'} -m pip install amd-quark"
    assert finding("amd-quark", new, wanted=MX).status == "skipped"
    assert finding("amd-quark", new, wanted=Wanted("mxfp4_fp8", "auto", "quark")).status == "fail"
    there = machine(old.root, installed={"vllm": "0.32.0", "amd-quark": "0.13"})
    assert finding("amd-quark", there, wanted=MX).found == "amd-quark 0.13"
    assert finding("amd-quark", old).status == "skipped"
    assert finding("amd-quark", old, wanted=MX, vllm=tmp_path / "none").status == "skipped"


def test_what_does_not_load(tmp_path: Path, finding):
    box = machine(trees.healthy(tmp_path))  # AVX-512 without AMX
    assert finding("checkpoint", box).status == "skipped"
    assert finding("checkpoint", box, wanted=Wanted("ptpc_fp8", "auto", "quark")).status == "ok"
    assert finding("checkpoint", box, wanted=Wanted("ptpc_fp8", "fp8", "quark")).status == "warn"
    for scheme in ("mxfp4", "fp8_block"):
        assert finding("checkpoint", box, wanted=Wanted(scheme, "auto", "quark")).status == "fail"
    instinct = machine(trees.instinct(tmp_path / "gpu", count=1))
    seen = finding("checkpoint", instinct, wanted=Wanted("ptpc_fp8", "fp8", "compressed-tensors"))
    assert (seen.status, "may clip" in seen.found) == ("warn", True)


def test_a_real_interpreter_is_asked_without_imports(tmp_path: Path):
    """A folder with a torch that must not be imported, and metadata of two distributions."""
    import sys

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '2.10.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n"
    )
    for name, version in (("vllm", "0.32.0+rocm700"), ("amd_quark", "0.13")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "vllm").write_text("")
    (binaries / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    (binaries / "python").chmod(0o755)
    found = installed(VllmEnvironment(binaries / "vllm", "the test"), Machine())
    assert found is not None
    assert (found.vllm, found.build, found.versions.get("amd-quark")) == ("0.32.0+rocm700", "rocm", "0.13")
