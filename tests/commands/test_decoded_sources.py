"""Resumption, GPTQ, `scheme: auto` and inspection with a quantized source, beside its decoded weights."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_encoded_sources import decompressed, stored
from tests.oracles import EqualTo, assert_equal

Quantmint = Callable[..., Any]
Models = Callable[..., Path]

pytestmark = pytest.mark.timeout(300)

FORMS = {"w4a16": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


@pytest.fixture(params=FORMS)
def folders(request: pytest.FixtureRequest, quantmint: Quantmint, models: Models) -> tuple[str, str]:
    """A source in INT4 or MXFP4, and the same in 16 bit, as the library of compressed-tensors decompresses it."""
    made = quantmint("quantize", models("llama", sharded=True), "first", "--scheme", request.param)
    assert made.code == 0, made.err
    assert decompressed(Path("first"), Path("plain"), FORMS[request.param]) == 14
    return "first", "plain"


def run(warm_python: Path, arguments: list[str], moments: dict[str, int | None]) -> list[dict[str, Any]]:
    """Run ``quantize`` once for each folder, killed before the rename of that number, and then to its end."""
    Path("job.json").write_text(json.dumps({"arguments": ["quantize", *arguments], "folders": moments}))
    script = [warm_python, "-m", "tests.commands.killed_quantize", "job.json", "ended.json"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ended: list[dict[str, Any]] = json.loads(Path("ended.json").read_text())
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["none", "gptq"])
def test_a_killed_run_goes_on_to_the_same_bytes(
    folders: tuple[str, str],
    words: tuple[str, ...],
    warm_python: Path,
    quantmint: Quantmint,
    equal_to: EqualTo,
    algorithm: str,
) -> None:
    source, decoded = folders
    options = ["--scheme", "mxfp8"] if algorithm == "none" else ["--scheme", "mxfp4", "--algorithm", "gptq", *words]
    made = quantmint("quantize", decoded, "expected", *options)
    assert made.code == 0, made.err
    [plain] = run(warm_python, [*options, source], {"whole": None})
    assert plain["code"] == 0
    [ended] = run(warm_python, [*options, source], {"killed": int(Path("whole.renames").read_text()) * 2 // 3})
    assert (ended["killed"], ended["code"]) == (-9, 0)
    assert_equal(stored(Path("killed")), stored(Path("whole")))
    form = json.loads(Path("first/config.json").read_text())["quantization_config"]["format"]
    equal_to(f"compressed-tensors' decoding of {form}", stored(Path("whole")), stored(Path("expected")))
    for against in folders:
        inspected = quantmint("inspect", "killed", "--source", against)
        assert inspected.code == 0, inspected.out


def test_auto_chooses_as_from_the_decoded_weights(
    folders: tuple[str, str], words: tuple[str, ...], quantmint: Quantmint
) -> None:
    options = ("--scheme", "auto", "--from", "mxfp4,ptpc_fp8", "--bits", "6", *words)
    chosen = []
    for source in folders:
        made = quantmint("quantize", source, f"auto-{source}", *options, "--json")
        assert made.code == 0, made.err
        chosen.append(json.loads(Path(f"auto-{source}/config.json").read_text())["quantization_config"])
        inspected = quantmint("inspect", f"auto-{source}", "--source", source)
        assert inspected.code == 0, inspected.out
    assert chosen[0] == chosen[1]
    assert len(chosen[0]["config_groups"]) == 2
