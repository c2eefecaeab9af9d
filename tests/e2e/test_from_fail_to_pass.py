"""From a FAIL in four bits, by nothing but what the command prints, to a PASS that is published."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from quantmint.pipeline.commands.cli import main
from tests.bench import smollm2
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


@pytest.mark.skipif("QUANTMINT_WALK" not in os.environ, reason="takes most of an hour on two cores: `make walk`")
@pytest.mark.timeout(7200)
def test_the_printed_block_leads_to_a_pass_on_smollm2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From `recipe init` with a text of one's own to a release, by what is printed; minutes beside those of `plan`."""
    model = smollm2.fetch()
    monkeypatch.chdir(tmp_path)
    documents = json.loads((model / smollm2.HELD_OUT).read_text())
    Path("news.txt").write_text("\n\n".join(documents[:220]))
    steps: list[str] = []

    def walk(*arguments: object) -> tuple[int, str, str]:
        planned = json.loads(quantmint(capsys, "plan", "recipes/own.yaml", "--json")[1])
        began = time.monotonic()
        ended = quantmint(capsys, *arguments)
        tries = planned.get("seconds_of_all_tries", planned["seconds"])
        taken = (time.monotonic() - began) / 60
        steps.append(f"{taken:.1f} min, planned {planned['seconds'] / 60:.1f}, with all tries {tries / 60:.1f}")
        return ended

    chosen = ("--text", "news.txt", "--target", "cpu", "--scheme", "mxfp4", "--name", "own", "--json")
    assert quantmint(capsys, "recipe", "init", model, *chosen)[0] == 0
    code, told, progress = walk("run", "recipes/own.yaml")
    assert code == 1, progress
    block = yaml.safe_load(told[told.index("\nquantization:") :].partition("\n\n")[0])
    recipe = Path("recipes/own.yaml")
    data = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**data, **block}, sort_keys=False))
    code, told, progress = walk("run", "recipes/own.yaml")
    with capsys.disabled():
        print("\n".join(["", *steps, told]))  # noqa: T201 - the figures are the point
    assert code == 0, progress
    assert Path("published/own/config.json").is_file()
    assert quantmint(capsys, "release", "verify", "published/own", "--unsigned")[0] == 0
