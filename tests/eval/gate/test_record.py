"""The record on disk: the same bytes for the same judgement, and nothing believed that its hash does not vouch for."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import record
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Policy, judge
from quantmint.eval.measurements import Measurements
from quantmint.eval.verdict import Verdict
from tests.eval.measured import make_pair


@pytest.fixture
def path(measurements: Measurements, policy: Policy, tmp_path: Path) -> Path:
    return record.write(tmp_path / "one", measurements, judge(measurements, policy))


def test_the_same_judgement_is_the_same_bytes(
    path: Path, measurements: Measurements, policy: Policy, tmp_path: Path
) -> None:
    other = record.write(tmp_path / "two", measurements, judge(measurements, policy))
    files = sorted(p.relative_to(path.parent) for p in path.parent.rglob("*") if p.is_file())
    assert [str(file) for file in files] == [
        "gate.json",
        "samples/tiny_arithmetic.baseline.json.gz",
        "samples/tiny_arithmetic.candidate.json.gz",
        "samples/tiny_facts.again.json.gz",
        "samples/tiny_facts.baseline.json.gz",
        "samples/tiny_facts.candidate.json.gz",
        "samples/tiny_grammar.baseline.json.gz",
        "samples/tiny_grammar.candidate.json.gz",
    ]
    for file in files:
        assert (other.parent / file).read_bytes() == (path.parent / file).read_bytes()


def test_names_of_tasks_that_no_file_could_have(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    pairs = {name: make_pair(name, 40, right=30, losses=i, gains=i) for i, name in enumerate(("a/b", "a_b", "../a"))}
    changed = dataclasses.replace(measurements, samples=pairs, control={})
    made = record.write(tmp_path, changed, judge(changed, policy))
    assert record.read(made)[0] == changed
    assert {file.parent for file in tmp_path.rglob("*.gz")} == {tmp_path / "samples"}


def test_a_record_that_was_touched_is_refused(path: Path) -> None:
    victim = path.parent / "samples" / "tiny_facts.candidate.json.gz"
    victim.write_bytes(gzip.compress(gzip.decompress(victim.read_bytes()).replace(b"0.0", b"1.0"), mtime=0))
    with pytest.raises(MeasurementError, match="SHA-256 differs"):
        record.rejudge(path)
    victim.unlink()
    with pytest.raises(MeasurementError, match="cannot be read"):
        record.rejudge(path)


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def entry(data: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = data["measurements"]["samples"]["tiny_facts"]["baseline"]
    return found


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(schema=1), "schema 1, this version reads 2"),
        (lambda data: data.pop("schema"), "not a record"),
        (lambda data: data.pop("measurements"), "not a record"),
        (lambda data: data["measurements"].pop("artefact"), "not a Measurements: artefact"),
        (lambda data: data["measurements"]["launches"][0].update(side="both"), "not a Measurements: launches.0.side"),
        (lambda data: data["measurements"]["servers"]["baseline"].pop("argv"), "baseline.argv"),
        (
            lambda data: data["measurements"]["servers"]["candidate"].update(runtime=None),
            "candidate.runtime: .*None",
        ),
        (lambda data: data["measurements"]["servers"]["candidate"].update(template=[]), "candidate.template"),
        (lambda data: data["measurements"]["servers"]["candidate"]["argv"].append(7), "candidate.argv"),
        (lambda data: data["measurements"]["canary"].update(kl_low=math.nan), "canary.kl_low: .*finite"),
        (lambda data: data["measurements"]["canary"].update(agreement="1"), "canary.agreement"),
        (lambda data: data["measurements"].update(stopped=1), "not a Measurements: stopped"),
        (lambda data: data["measurements"].update(weights=[math.inf, 1]), "not a Measurements: weights.0"),
        (lambda data: data["policy"].update(margin=1), "policy.margin: Unexpected"),
        (lambda data: data["policy"]["margins"].update(tiny_facts=math.inf), "policy.margins.tiny_facts"),
        (
            lambda data: data["policy"]["margins"].update(tiny_facts=2.0),
            "policy.margins.tiny_facts: .*less than 1, found 2.0",
        ),
        (lambda data: data["policy"].update(confidence=0.1), "policy.confidence: .*0.1"),
        (lambda data: data["policy"].update(confidence=1), "policy.confidence: .*less than 1"),
        (lambda data: data["policy"].update(throughput_confidence=1.0), "policy.throughput_confidence: .*less than 1"),
        (lambda data: data["policy"].update(launches=None), "policy.launches"),
        (lambda data: data["policy"]["canary"].update(max_kl=math.nan), "policy.canary.max_kl"),
        (lambda data: data.update(verdict="FINE"), "not a GateReport: verdict: .*PASS.*FINE"),
        (lambda data: entry(data).update(file="../../secret.json"), "outside the record's folder"),
        (lambda data: data["measurements"].update(samples=[1]), "not a record"),
    ],
)
def test_anything_else_is_no_record(path: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        record.read(edited(path, edit))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"gate"', "\ud800"])
def test_files_that_are_no_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gate.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(MeasurementError, match="not a record"):
        record.read(file)


def test_a_sample_file_that_is_not_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = path.parent / "samples" / "tiny_facts.baseline.json.gz"

    def vouched(data: bytes) -> Path:
        file.write_bytes(data)
        return edited(path, lambda record: entry(record).update(sha256=hashlib.sha256(data).hexdigest()))

    whole = file.read_bytes()
    with pytest.raises(MeasurementError, match="cannot be unpacked"):
        record.read(vouched(whole[:-9]))
    with pytest.raises(MeasurementError, match="cannot be unpacked"):
        record.read(vouched(b"{}"))
    with pytest.raises(MeasurementError, match="not a mapping of columns"):
        record.read(vouched(gzip.compress(b"{}")))
    monkeypatch.setattr(record, "LARGEST", 1 << 10)
    with pytest.raises(MeasurementError, match="unpacks to more than 1,024 bytes"):
        record.read(vouched(gzip.compress(bytes(1 << 20))))


def test_a_forged_verdict_does_not_survive(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    pair = make_pair("tiny_facts", 2000, right=1700, losses=200, gains=0)
    lossy = dataclasses.replace(measurements, samples={**measurements.samples, "tiny_facts": pair}, control={})
    path = record.write(tmp_path, lossy, dataclasses.replace(judge(lossy, policy), verdict=Verdict.PASS))
    assert record.rejudge(path).verdict is Verdict.FAIL


def test_your_own_policy(path: Path, policy: Policy) -> None:
    assert record.rejudge(path).verdict is Verdict.PASS
    strict = dataclasses.replace(policy, min_ratio=1.5)
    assert record.rejudge(path, strict).verdict is Verdict.FAIL
