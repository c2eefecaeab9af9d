"""Looks at the serving environment: which vLLM, built for what, and with what beside it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.machine import run_command
from quantmint.pipeline.serving.host.context import CheckpointNeeds, gather_context
from tests.serving.host import trees
from tests.serving.host.trees import machine

MX = CheckpointNeeds("mxfp4", "fp8", "quark")


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.19.0", "ok"),
        ("0.33.1+rocm711", "ok"),
        ("0.23.1.dev3+gabc", "ok"),
        ("0.34.0", "warn"),
        ("0.18.2", "fail"),
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


@pytest.mark.parametrize(
    ("said", "torch", "old", "new"),
    [
        ("7.1.0-38", "2.9.1+rocm7.1", ("ok", "7.1.0-38"), ("ok", "7.1.0-38")),
        ("6.4.1", "2.9.1+rocm7.0", ("ok", "6.4.1, PyTorch's is 7.0"), ("fail", "6.4.1, PyTorch's is 7.0")),
        (None, "2.8.0+rocm6.2", ("fail", "6.2"), ("fail", "6.2")),
        (None, "2.9.1+cpu", ("skipped", "neither"), ("skipped", "neither")),
    ],
)
def test_rocm(tmp_path: Path, finding, said: str | None, torch: str, old, new):
    for tree, (status, found) in ((trees.instinct(tmp_path / "old"), old), (trees.mi355x(tmp_path / "new"), new)):
        if said is not None:
            trees.write(tree, "opt/rocm/.info/version", said)
        seen = finding("rocm", machine(tree, installed={"torch": torch}))
        assert (seen.status, seen.found.startswith(found)) == (status, True), seen


def test_aiter(tmp_path: Path, finding):
    tree = trees.instinct(tmp_path / "gpu")
    for name, status in (("amd-aiter", "ok"), ("aiter", "ok"), ("vllm", "fail")):
        assert finding("aiter", machine(tree, installed={name: "0.1.9"})).status == status
    assert finding("aiter", machine(tree), vllm=tmp_path / "none").status == "skipped"


def test_quark_where_mx_is_emulated(tmp_path: Path, finding, vllm: Path):
    old, new = (machine(trees.instinct(tmp_path / "old")), machine(trees.mi355x(tmp_path / "new")))
    seen = finding("amd-quark", old, checkpoint=MX)
    assert (seen.status, seen.found) == ("fail", "amd-quark is not installed")
    assert seen.fix == f"{vllm.parent / 'python'} -m pip install amd-quark"
    assert finding("amd-quark", new, checkpoint=MX).status == "skipped"
    assert finding("amd-quark", new, checkpoint=CheckpointNeeds("mxfp4_fp8", "auto", "quark")).status == "fail"
    there = machine(old.root, installed={"vllm": "0.32.0", "amd-quark": "0.13"})
    assert finding("amd-quark", there, checkpoint=MX).found == "amd-quark 0.13"
    assert finding("amd-quark", old).status == "skipped"
    assert finding("amd-quark", old, checkpoint=MX, vllm=tmp_path / "none").status == "skipped"


def test_what_does_not_load(tmp_path: Path, finding):
    box = machine(trees.healthy(tmp_path))  # AVX-512 without AMX
    assert finding("checkpoint", box).status == "skipped"
    assert finding("checkpoint", box, checkpoint=CheckpointNeeds("ptpc_fp8", "auto", "quark")).status == "ok"
    assert finding("checkpoint", box, checkpoint=CheckpointNeeds("ptpc_fp8", "fp8", "quark")).status == "warn"
    for scheme in ("mxfp4", "fp8_block"):
        assert finding("checkpoint", box, checkpoint=CheckpointNeeds(scheme, "auto", "quark")).status == "fail"
    instinct = machine(trees.instinct(tmp_path / "gpu", count=1))
    seen = finding("checkpoint", instinct, checkpoint=CheckpointNeeds("ptpc_fp8", "fp8", "compressed-tensors"))
    assert (seen.status, "may clip" in seen.found) == ("warn", True)


def test_a_real_interpreter_is_asked(tmp_path: Path):
    for name, version in (("vllm", "0.32.0+rocm700"), ("amd_quark", "0.13")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    (binaries / "vllm").write_text("#!/bin/sh\n")
    for name in ("python", "vllm"):
        (binaries / name).chmod(0o755)
    found = gather_context(
        replace(trees.machine(trees.healthy(tmp_path / "root")), run=run_command), vllm=binaries / "vllm"
    ).installed
    assert found is not None
    assert (found.vllm, found.versions.get("amd-quark")) == ("0.32.0+rocm700", "0.13")
