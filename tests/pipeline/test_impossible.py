"""A recipe that asks for the impossible is refused before any work, in one message that names the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Quantmint = Callable[..., Any]
CPU = ("hardware: mi300x", "hardware: cpu")
CASES = {
    "an unknown scheme": (
        [("ptpc_fp8", "ptcp_fp8")],
        r'r\.yaml:4:24: quantization\.scheme: .*"ptcp_fp8".*\(did you mean "ptpc_fp8"\?\)',
    ),
    "a margin that the suite cannot test": (
        [("margin: 0.02", "margin: 0.001")],
        r"r\.yaml:8:27: gate\.accuracy\.margin: tiny_facts: 2000 items can test a margin of .* or wider, not 0\.10%",
    ),
    "a limit that leaves too few items": (
        [("concurrency: 8", "concurrency: 8, limit: 50")],
        r"r\.yaml:8:27: gate\.accuracy\.margin: tiny_facts: 50 items can test",
    ),
    "FP8 that no server on a CPU loads": (
        [("ptpc_fp8", "fp8"), CPU],
        r"r\.yaml:4:24: quantization\.scheme: found fp8, which cpu cannot serve: .*ptpc_fp8 loads there",
    ),
    "blocks in a layout without them": (
        [("ptpc_fp8", "fp8_block"), ("compressed-tensors", "quark")],
        r"r\.yaml:4:24: quantization\.scheme: found fp8_block in quark, expected format compressed-tensors",
    ),
    "a cache without data for its scales": (
        [("calibration: {", "# calibration: {")],
        r"r\.yaml:4:44: quantization\.kv_cache: found fp8 without calibration",
    ),
    "requests longer than the model": (
        [("max_model_len: 512", "max_model_len: 1024")],
        r"r\.yaml:6:\d+: target\.max_model_len: found 1024, expected at most 512",
    ),
    "an unknown suite": ([("suite: tiny", "suite: tinny")], r"r\.yaml:7:21: evaluation\.suite: .*did you mean 'tiny'"),
    "a model that is not there": (
        [("folder: model", "folder: modle")],
        r"r\.yaml:3:18: source\.folder: found no folder .*modle",
    ),
}


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("case", CASES)
def test_refused(quantmint: Quantmint, project: Path, command: str, case: str) -> None:
    edits, expected = CASES[case]
    recipe = project / "r.yaml"
    text = recipe.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    recipe.write_text(text)
    ended = quantmint(command, "r.yaml", "--until", "inspect") if command == "run" else quantmint(command, "r.yaml")
    assert ended.code == 2
    assert ended.out == ""
    assert re.search(expected, ended.err), ended.err
    assert ended.err.count("quantmint:") == 1
    assert "Traceback" not in ended.err
    assert not (project / "store").exists(), "nothing was made, fetched or hashed"


NARROW = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 72}


@pytest.mark.parametrize("command", ["run", "plan"])
def test_groups_that_do_not_divide_the_model(
    quantmint: Quantmint, project: Path, write_model: Callable[..., Path], command: str
) -> None:
    write_model(project / "narrow", **NARROW)
    text = (project / "r.yaml").read_text().replace("folder: model", "folder: narrow")
    (project / "r.yaml").write_text(text.replace("ptpc_fp8", "mxfp4").replace("mi300x", "mi355x"))
    ended = quantmint(command, "r.yaml")
    assert ended.code == 2
    assert ended.err.startswith("quantmint: r.yaml:4:24: quantization.scheme: ")
    assert re.search(r"found mxfp4 with .*(48|72).*, expected a multiple of 32", ended.err), ended.err
    assert ended.err.count("quantmint:") == 1
    assert not (project / "store").exists()


def test_a_cache_that_this_cpu_cannot_read(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(text.replace(*CPU))
    monkeypatch.setattr("pipeline.session.local_cpu_flags", lambda: frozenset({"avx2"}))
    ended = quantmint("run", "r.yaml")
    assert ended.code == 2
    assert ended.err.startswith("quantmint: r.yaml:4:44: quantization.kv_cache: found fp8, which cpu cannot serve")
