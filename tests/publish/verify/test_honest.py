"""An honest release: verified by whoever has it, wherever that is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.publish.verify.files import Trust
from quantmint.pipeline.publish.verify.subject import CheckOutcome, exit_code
from tests.publish.verify.conftest import Quantmint, Verify

NAMES = ["manifest", "files", "digests", "signature", "provenance", "recipe", "structure", "gate", "report", "card"]
Keys = Callable[[str], tuple[Path, Path]]


def test_every_check_of_a_signed_release_holds(signed: Path, keys: Keys, check: Verify) -> None:
    before = {path: path.stat().st_mtime_ns for path in signed.rglob("*")}
    checks = check(signed, Trust(key=keys("ours")[1]))
    assert list(checks) == NAMES
    assert {name: found.reason for name, found in checks.items() if found.outcome is not CheckOutcome.OK} == {}
    assert re.fullmatch(r"signed by the key [0-9a-f]{16}, over \d\d files", checks["signature"].reason)
    assert {path: path.stat().st_mtime_ns for path in signed.rglob("*")} == before


def test_without_a_key_a_signature_proves_nothing(signed: Path, quantmint: Quantmint) -> None:
    told = quantmint("release", "verify", signed, "--json")
    assert (told.code, told.json["exit_code"]) == (3, 3)
    outcomes = {check["name"]: check["outcome"] for check in told.json["checks"]}
    assert [name for name, outcome in outcomes.items() if outcome != "OK"] == ["signature"]
    assert outcomes["signature"] == "NOT CHECKED"


def test_an_unsigned_release_is_said_to_be_one(release: Path, quantmint: Quantmint, keys: Keys) -> None:
    ended = quantmint("release", "verify", release)
    assert (ended.code, ended.out.startswith("NOT ALL CHECKED")) == (3, True)
    line = next(line for line in ended.out.splitlines() if " signature " in line)
    assert line.split(maxsplit=1)[0] == "?"
    assert "could have made all of it anew" in ended.out
    accepted = quantmint("release", "verify", release, "--unsigned")
    assert (accepted.code, accepted.out.startswith("CONSISTENT, UNSIGNED")) == (0, True)
    expected = quantmint("release", "verify", release, "--key", keys("ours")[1])
    assert (expected.code, "the signature was taken away" in expected.out) == (1, True)


@pytest.mark.slow
def test_the_published_folder_is_enough(signed: Path, keys: Keys, tmp_path: Path) -> None:
    """An empty home, another folder to stand in, and where the store would be a file: nobody could write one."""
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    elsewhere.mkdir()
    home.mkdir()
    (tmp_path / "store").write_text("")
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "QUANTMINT_STORE": str(tmp_path / "store"),
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    public = shutil.copy(keys("ours")[1], tmp_path / "ours.pub")
    command = [sys.executable, "-m", "quantmint", "release", "verify", str(signed), "--key", str(public), "--json"]
    ended = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (0, 0), ended.stdout + ended.stderr
    assert {check["outcome"] for check in json.loads(ended.stdout)["checks"]} == {"OK"}
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in home.iterdir()} <= {".cache", ".config"}  # matplotlib's list of fonts


def test_what_the_hubs_clients_leave_is_no_part_of_it(signed: Path, keys: Keys, check: Verify) -> None:
    (signed / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (signed / ".cache/huggingface/download").mkdir(parents=True)
    (signed / ".cache/huggingface/download/config.json.metadata").write_text("c0ffee\n")
    checks = check(signed, Trust(key=keys("ours")[1]))
    assert exit_code(list(checks.values())) == 0


def test_a_snapshot_of_the_hubs_cache_leads_to_its_blobs(
    signed: Path, keys: Keys, check: Verify, tmp_path: Path
) -> None:
    cache = tmp_path / "models--org--llama"
    snapshot = cache / "snapshots" / ("c0" * 20)
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in signed.rglob("*") if path.is_file())):
        blob, link = cache / "blobs" / f"{number}", snapshot / path.relative_to(signed)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    checks = check(snapshot, Trust(key=keys("ours")[1]))
    assert {name: found.reason for name, found in checks.items() if found.outcome is not CheckOutcome.OK} == {}


def test_what_is_no_release(release: Path, quantmint: Quantmint, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ((tmp_path / "empty",), "no release of quantmint"),
        ((tmp_path / "nowhere" / "at-all" / "x",), "nothing was published there"),
        ((release, "--key", tmp_path / "none.pub"), "No such file"),
        ((release, "--key", release / "config.json"), "config.json"),
        ((release, "--identity", "me@example.org"), "expected both"),
    ):
        ended = quantmint("release", "verify", *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
