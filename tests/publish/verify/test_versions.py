"""Releases of other versions of quantmint: an untouched one never fails, and no version switches a check off."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.gate import JUDGEMENT, judgement
from quantmint.eval.gate.report import Finding
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish.release import MANIFEST
from quantmint.pipeline.publish.verify.subject import CheckOutcome
from tests.publish.verify import honest
from tests.publish.verify.conftest import Quantmint, Verify
from tests.publish.verify.test_tampering import GATE, edit, given_to_the_gate, said


@pytest.fixture
def reworded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version that words its headlines and reasons otherwise."""
    rows = {name: {**row, "title": f"{row['title']}, reworded"} for name, row in judgement._table().items()}
    monkeypatch.setattr(judgement, "_table", lambda: rows)
    judge = judgement.accuracy.judge

    def judged(*given: Any, **options: Any) -> Finding:
        finding = judge(*given, **options)
        return Finding(finding.kind, finding.subject, finding.verdict, f"In short: {finding.reason}", finding.label)

    monkeypatch.setattr(judgement.accuracy, "judge", judged)


@pytest.mark.usefixtures("reworded")
def test_sentences_of_another_version_fail_no_release(release: Path, earlier: Path, quantmint: Quantmint) -> None:
    for folder in (release, earlier):
        told = quantmint("release", "verify", folder, "--unsigned", "--json")
        assert {check["outcome"] for check in told.json["checks"]} <= {"OK", "NOT CHECKED"}, told.out
        assert told.code in (0, 3)
        again = quantmint("gate", folder, "--json")
        assert (again.code, again.json["differences"]) == (0, [])


@pytest.mark.usefixtures("reworded")
def test_sentences_of_another_version_stop_no_publication(release: Path) -> None:
    from quantmint.eval import record
    from quantmint.eval.gate import changes

    path = release / GATE
    assert changes(record.read(path)[1], record.rejudge(path)) == ()


def test_a_release_of_the_version_before(earlier: Path, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    told = quantmint("release", "verify", earlier, "--unsigned", "--json")
    assert {check["name"] for check in told.json["checks"] if check["outcome"] == "FAILS"} == set(), told.out
    assert told.code in (0, 3)
    gate = quantmint("gate", earlier, "--json")
    assert (gate.code, gate.json["differences"]) == (0, [])


def test_another_version_of_the_judgement_is_said_and_not_held_against_a_release(
    release: Path, quantmint: Quantmint, check: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later gate that finds a longer interval comes to other figures by a new version."""
    assert json.loads((release / GATE).read_text())["judgement"] == JUDGEMENT
    edit(release / GATE, lambda data: data.update(judgement=JUDGEMENT + 1))
    edit(release / GATE, lambda data: data["accuracy"][0].update(lower=-0.04))
    honest.forge(release)
    gate = check(release)["gate"]
    assert gate.outcome is CheckOutcome.NOT_CHECKED
    assert f"version {JUDGEMENT + 1} of the judgement made this record" in gate.reason
    edit(release / GATE, lambda data: data.update(judgement=JUDGEMENT))
    assert check(release)["gate"].outcome is CheckOutcome.FAILS


def worse_answers(folder: Path, task: str = "facts") -> None:
    """A third of the right answers are wrong, the record is judged by a margin of 45 %, and its report with it."""
    from quantmint.eval import record
    from quantmint.eval.gate import judge

    path = folder / f"quantmint/samples/{task}.candidate.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    right = [number for number, score in enumerate(data["samples"]["score"]) if score == 1.0]
    for number in right[: len(right) // 3]:
        data["samples"]["score"][number] = 0.0
    raw = gzip.compress(json.dumps(data).encode(), mtime=0)
    path.write_bytes(raw)

    def named(content: dict[str, Any]) -> None:
        content["measurements"]["samples"][task]["candidate"]["sha256"] = hashlib.sha256(raw).hexdigest()
        content["policy"]["margins"] = dict.fromkeys(content["policy"]["margins"], 0.45)

    edit(folder / GATE, named)
    given_to_the_gate(
        folder, lambda settings: settings["policy"].update(margins=dict.fromkeys(settings["policy"]["margins"], 0.45))
    )
    measurements, recorded = record.read(folder / GATE)
    record.write(folder / "quantmint", measurements, judge(measurements, recorded.policy))


@pytest.mark.parametrize("version", [None, "0.0.9", "99.0"])
def test_the_recipes_limits_hold_in_every_version(
    release: Path, quantmint: Quantmint, check: Verify, version: str | None
) -> None:
    worse_answers(release)
    honest.forge(release, **({} if version is None else {"quantmint": version}))
    found = check(release)
    assert found["gate"].outcome is CheckOutcome.FAILS
    assert "judged by other limits than the recipe's: margins.facts is 0.45, not 0.05" in said(found["gate"])
    assert "does not follow" not in said(found["gate"])
    assert quantmint("release", "verify", release, "--unsigned").code == 1


def shipped_suite(folder: Path) -> None:
    """The recipe names a suite of quantmint instead of its own."""

    def named(data: dict[str, Any]) -> None:
        data["recipe"]["evaluation"]["suite"] = "no-longer-shipped"
        data["recipe_fingerprint"] = fingerprint(data["recipe"])

    edit(folder / MANIFEST, named)
    recipe = folder / "quantmint/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("quantmint/suite/two.yaml", "no-longer-shipped"))


def test_a_suite_that_this_version_has_not(release: Path, check: Verify) -> None:
    shipped_suite(release)
    honest.forge(release)
    assert check(release)["gate"].outcome is CheckOutcome.FAILS
    honest.forge(release, quantmint="0.0.9")
    gate = check(release)["gate"]
    assert gate.outcome is CheckOutcome.NOT_CHECKED
    assert "the suite no-longer-shipped cannot be read here" in gate.reason
    # What the recipe states itself holds without the suite.
    edit(release / GATE, lambda data: data["policy"].update(confidence=0.5))
    given_to_the_gate(release, lambda settings: settings["policy"].update(confidence=0.5))
    honest.forge(release, quantmint="0.0.9")
    assert "confidence is 0.5, not 0.95" in said(check(release)["gate"])


def test_promises_of_the_recipe_hold_without_its_suite(release: Path, check: Verify) -> None:
    surely = {"confidence": 0.95}
    promises = {"kl": {"max": 0.05}, "layout": {"max": 0.02}, "acceptance": {"margin": 0.02}}
    stated = {section: promise | surely for section, promise in promises.items()}

    def promise_all(data: dict[str, Any]) -> None:
        data["recipe"]["gate"].update(stated, long={"max_kl": 0.2}, accuracy={"margins": {"sums": 0.07}})
        data["recipe"]["evaluation"]["long"] = {"lengths": [64, 128], "needles": 1, "set": "tiny"}
        data["recipe"]["serve"]["speculative"] = {"method": "ngram", "tokens": 2}
        data["recipe_fingerprint"] = fingerprint(data["recipe"])

    def judged_by(margins: dict[str, float], **policy: object) -> str:
        def change(record: dict[str, Any]) -> None:
            record["policy"].update(policy)
            record["policy"]["margins"].update(margins)

        edit(release / GATE, change)
        given_to_the_gate(release, change)
        honest.forge(release, quantmint="0.0.9")
        return said(check(release)["gate"])

    shipped_suite(release)
    edit(release / MANIFEST, promise_all)
    margins = {"sums": 0.07, "long_likelihood_to_64": 0.02, "long_likelihood_to_128": 0.02, "long_retrieval": 0.1}
    assert "other limits than the recipe's" not in judged_by(margins, **stated, long_kl=0.2)
    laxer = {section: promise | {"confidence": 0.6} for section, promise in promises.items()}
    reason = judged_by({"sums": 0.3, "long_retrieval": 0.4}, **laxer, long_kl=0.9, baseline_tolerance=0.2)
    for words in (
        "kl.confidence is 0.6, not 0.95",
        "layout.confidence is 0.6, not 0.95",
        "acceptance.confidence is 0.6, not 0.95",
        "long_kl is 0.9, not 0.2",
        "margins.sums is 0.3, not 0.07",
        "margins.long_retrieval is 0.4, not 0.1",
        "baseline_tolerance is 0.2, not 0.03",
    ):
        assert f"gate.json was judged by other limits than the recipe's: {words}" in reason


def test_defaults_of_the_canary_may_have_been_others(release: Path, check: Verify) -> None:
    change: Callable[[dict[str, Any]], None] = lambda data: data["policy"]["canary"].update(max_kl=0.9)  # noqa: E731
    edit(release / GATE, change)
    given_to_the_gate(release, change)
    honest.forge(release)
    assert check(release)["gate"].outcome is CheckOutcome.FAILS
    honest.forge(release, quantmint="0.0.9")
    gate = check(release)["gate"]
    assert (gate.outcome, "canary.max_kl is 0.9, not 0.5" in gate.reason) == (CheckOutcome.NOT_CHECKED, True)


def fewer_items(folder: Path, planned: int = 320) -> None:
    """The first fifth of the items of a task is dropped from both sides, and fewer are said to have been planned."""
    from quantmint.eval import record
    from quantmint.eval.gate import judge

    for side in ("baseline", "candidate"):
        path = folder / f"quantmint/samples/facts.{side}.json.gz"
        data = json.loads(gzip.decompress(path.read_bytes()))
        data["samples"] = {name: column[-planned:] for name, column in data["samples"].items()}
        data["planned"] = planned
        raw = gzip.compress(json.dumps(data).encode(), mtime=0)
        path.write_bytes(raw)
        edit(
            folder / GATE,
            lambda content, side=side, raw=raw: content["measurements"]["samples"]["facts"][side].update(
                sha256=hashlib.sha256(raw).hexdigest()
            ),
        )
    measurements, recorded = record.read(folder / GATE)
    record.write(folder / "quantmint", measurements, judge(measurements, recorded.policy))


@pytest.mark.parametrize("version", ["0.0.9", None])
def test_items_that_were_dropped(release: Path, check: Verify, version: str | None) -> None:
    fewer_items(release)
    honest.forge(release, **({} if version is None else {"quantmint": version}))
    gate = check(release)["gate"]
    assert gate.outcome is CheckOutcome.FAILS
    assert "facts: 320 items of the baseline were planned, the suite has 400" in said(gate)
