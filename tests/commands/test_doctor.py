"""`quantmint doctor` on this very machine, which serves on its CPU: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from quantmint.pipeline.commands.cli import main


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run it with a serving environment that answers as vLLM's CPU build; the code, and what was printed."""
    binaries = tmp_path / "serving" / "bin"
    binaries.mkdir(parents=True)
    answer = {"vllm": "0.32.0+cpu"}
    for name, text in (("vllm", ""), ("python", f"#!/bin/sh\necho '{json.dumps(answer)}'\n")):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("QUANTMINT_VLLM", str(binaries / "vllm"))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_the_machine_at_hand(doctor):
    code, out, _ = doctor("--target", "cpu", "--json")
    told = json.loads(out)
    assert told["target"] == "cpu:1"
    found = {finding["name"]: finding for finding in told["findings"]}
    assert {"accelerators", "vllm", "checkpoint"} <= set(found)
    assert not {"/dev/kfd", "ibstat"} & set(found)
    assert found["vllm"]["found"] == "0.32.0+cpu"
    assert set(found["vllm"]) == {"name", "status", "found", "expected", "why", "fix", "as_root", "source"}
    failed = any(finding["status"] == "fail" for finding in told["findings"])
    assert (code, told["ready"]) == (int(failed), not failed)


def test_a_vllm_that_is_not_there_fails(doctor):
    code, out, _ = doctor("--target", "cpu", "--vllm", "/no/such/vllm")
    assert code == 1
    assert "1 fail" in out
    assert "`make serving` installs one for a CPU" in out
    assert "source: quantmint" in out


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an Instinct")
def test_another_machine_is_not_this_one(doctor):
    code, out, _ = doctor("--target", "mi300x:16", "--fix-script")
    assert code == 1
    assert "modprobe amdgpu" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True, check=False, capture_output=True).stderr == ""


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an Instinct")
def test_a_recipe_brings_its_target_and_its_scheme(doctor):
    code, out, _ = doctor("--model", "llama70b-mxfp4", "--json")
    told = json.loads(out)
    assert (code, told["target"].partition(":")[0]) == (1, "mi355x")
    checkpoint = next(finding for finding in told["findings"] if finding["name"] == "checkpoint")
    assert (checkpoint["status"], "mxfp4" in checkpoint["found"]) == ("ok", True)
    code, out, _ = doctor("--model", "llama70b-mxfp4", "--target", "cpu", "--json")
    checkpoint = next(finding for finding in json.loads(out)["findings"] if finding["name"] == "checkpoint")
    assert (code, checkpoint["status"]) == (1, "fail")


def test_wrong_questions(doctor):
    assert doctor("--target", "mi299x:8")[0] == 2
    assert doctor("--model", "no-such-recipe")[0] == 2
    code, _, err = doctor("--json", "--fix-script")
    assert (code, "one of them" in err) == (2, True)


def test_nothing_is_changed(doctor, monkeypatch: pytest.MonkeyPatch):
    """Every command that is run asks: nvidia-smi, and the interpreter of the serving environment."""
    ran: list[str] = []
    real = subprocess.run

    def recorded(argv, **options):
        ran.append(Path(argv[0]).name)
        return real(argv, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    doctor("--target", "mi300x:8")
    assert set(ran) == {"python"} or set(ran) == {"python", "nvidia-smi"}
