"""A folder that somebody made to harm its reader: nothing outside is read, nothing grows without end, nothing runs."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.publish.release import CARD, MANIFEST, PROVENANCE, RECIPE
from quantmint.pipeline.publish.verify.subject import CheckOutcome, listing
from tests.publish.verify import honest
from tests.publish.verify.conftest import Quantmint, Verify
from tests.publish.verify.test_tampering import GATE, REPORT, edit, said


def test_what_leads_out_of_the_folder_is_not_read(release: Path, check: Verify, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    for name, place in (("config.json", secret), ("passwords.json", "/etc/passwd"), ("loop.json", "loop.json")):
        (release / name).unlink(missing_ok=True)
        (release / name).symlink_to(place)
    (release / "more").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(release / "pipe.json")
    found = listing(release)
    assert not {"config.json", "passwords.json", "loop.json", "pipe.json"} & found.files.keys()
    checks = check(release)
    for words in (
        "config.json is a link out of the folder",
        "passwords.json is a link out of the folder",
        "loop.json leads nowhere",
        "more is a link out of the folder",
        "pipe.json is neither a file nor a folder",
    ):
        assert words in said(checks["files"])
    assert "config.json is not there" in said(checks["structure"])


@pytest.mark.parametrize(
    "name", ["../../outside.json", "/etc/passwd", "a/../../b", "C:\\x", "nul\x00", ".//a", "config.json/x"]
)
def test_names_that_climb_are_refused(release: Path, quantmint: Quantmint, name: str) -> None:
    edit(release / MANIFEST, lambda data: data["files"].update({name: {"size": 1, "sha256": "ab" * 32}}))
    told = quantmint("release", "verify", release, "--unsigned", "--json")
    checks = {check["name"]: check for check in told.json["checks"]}
    assert (told.code, checks["manifest"]["outcome"]) == (1, "FAILS")
    assert checks["files"]["outcome"] == "NOT CHECKED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing"),
    [
        (MANIFEST, "manifest"), (GATE, "gate"), (REPORT, "report"), (PROVENANCE, "provenance"), (RECIPE, "recipe"),
        ("config.json", "structure"), (CARD, "card"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "content",
    ["[" * 200_000, '{"a": 1, "a": 2}', "null", "\ud800", ""],
    ids=["deep", "twice", "null", "surrogate", "empty"],
)
def test_no_text_breaks_more_than_its_own_checks(
    release: Path, check: Verify, name: str, failing: str, content: str
) -> None:
    (release / name).write_bytes(content.encode(errors="surrogatepass"))
    checks = check(release)
    assert checks[failing].outcome is CheckOutcome.FAILS
    assert len(checks[failing].reason) < 500
    assert len(checks) == 10


def test_samples_from_elsewhere(release: Path, check: Verify, tmp_path: Path) -> None:
    (tmp_path / "theirs.json.gz").write_bytes(gzip.compress(b"{}"))

    def named(data: dict[str, dict[str, dict[str, dict[str, dict[str, str]]]]]) -> None:
        data["measurements"]["samples"]["facts"]["candidate"]["file"] = "../../theirs.json.gz"

    edit(release / GATE, named)
    assert "lies outside the record's folder" in said(check(release)["gate"])


def test_code_of_the_folder_is_not_run(release: Path, check: Verify, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (release / "modeling_x.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    edit(release / "config.json", lambda data: data.update(model_type="unheard-of", auto_map=auto))
    honest.remanifest(release)
    checks = check(release)
    assert checks["structure"].outcome is CheckOutcome.NOT_CHECKED
    assert "modeling_x.py: code that readers would have to trust" in said(checks["files"])
    assert not ran.exists()


def test_control_characters_do_not_reach_a_terminal(release: Path, quantmint: Quantmint) -> None:
    (release / "a\x1b[2Jb.json").write_text("{}")
    told = quantmint("release", "verify", release, "--unsigned")
    assert told.code == 1
    assert "\x1b[2J" not in told.out
    assert "[2Jb.json" in told.out


def test_a_card_with_a_second_table(release: Path, check: Verify) -> None:
    card = release / CARD
    card.write_text(card.read_text() + "\n| facts (acc) | 10.00 % | 99.00 % |\n")
    honest.remanifest(release)
    assert "facts 10.00 % and 99.00 %" in said(check(release)["card"])


def test_scores_for_the_hub_that_are_not_the_gates(release: Path, check: Verify) -> None:
    scores: Callable[[str], Path] = lambda task: release / f".eval_results/{task}.yaml"  # noqa: E731
    scores("facts").parent.mkdir()
    scores("facts").write_text(json.dumps([{"dataset": {"id": "x/facts"}, "value": 99.0}]))
    scores("sums").write_text(json.dumps([{"dataset": {"id": "x/sums"}, "value": 80.0}]))
    scores("other").write_text(json.dumps([{"value": 1.0}]))
    honest.remanifest(release)
    found = check(release)["card"]
    assert ".eval_results/facts.yaml: the value is 99.0, the gate says 90.25" in said(found)
    assert "other.yaml is about a task that the gate did not judge" in said(found)
    assert "sums.yaml" not in said(found)
