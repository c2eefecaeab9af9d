"""From a FAIL in four bits, by nothing but what the command prints, to a PASS that is published."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from quantmint.pipeline.commands.cli import main
from tests.e2e.test_gate_cases import BASE, MXFP4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def quantmint(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def test_the_printed_block_leads_to_a_pass(
    tmp_path: Path, warm_python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_python))
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "own.yaml"
    calibration = {"set": "tiny", "samples": 32, "sequence_length": 128}
    data = {"name": "own", **BASE, "calibration": calibration, "quantization": MXFP4}
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    code, told, _ = quantmint(capsys, "run", recipe, "--store", "store")
    assert code in (1, 3)
    assert not Path("published").exists()
    assert re.search(r"\na run with this takes (about|at least) \d.* in all on this machine, from here", told)
    block = yaml.safe_load(told[told.index("\nquantization:") :].partition("\n\n")[0])
    assert set(block) == {"quantization", "search"}
    recipe.write_text(yaml.safe_dump({**data, **block}, sort_keys=False))
    code, _, _ = quantmint(capsys, "plan", recipe, "--store", "store")
    assert code == 0
    code, told, progress = quantmint(capsys, "run", recipe, "--store", "store")
    assert code == 0, progress
    assert Path("published/own/config.json").is_file()
    assert "A search tried up to" in Path("published/own/README.md").read_text()
    code, _, _ = quantmint(capsys, "release", "verify", "published/own", "--unsigned")
    assert code == 0
