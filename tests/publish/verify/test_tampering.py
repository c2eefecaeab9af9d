"""Whoever changes something is told of, by name: without a manifest of his own, and with one."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.release import CARD, MANIFEST, PROVENANCE, RECIPE, SIGNATURE
from quantmint.pipeline.publish.verify.files import Trust
from quantmint.pipeline.publish.verify.subject import CheckOutcome, ReleaseCheck
from tests.conftest import Models, Quantize
from tests.publish.verify import honest
from tests.publish.verify.conftest import Quantmint, Verify, signed_by

Keys = Callable[[str], tuple[Path, Path]]
Tamper = Callable[[Path], None]

GATE = "quantmint/gate.json"
REPORT = "quantmint/report.json"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    changed = change(data)
    path.write_text(json.dumps(data if changed is None else changed))


def replaced(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)


def better_report(folder: Path) -> None:
    edit(folder / REPORT, lambda data: data["gate"]["accuracy"][0].update(candidate=0.97))


def swapped_numbers(folder: Path) -> None:
    """The two columns of a row change places."""
    path = folder / CARD
    row = next(line for line in path.read_text().splitlines() if line.startswith("| facts (acc) |"))
    cells = row.split("|")
    cells[2], cells[3] = cells[3], cells[2]
    replaced(path, row, "|".join(cells))


def other_base(folder: Path) -> None:
    replaced(folder / CARD, "- org/llama", "- org/other")


def another_scheme(folder: Path) -> None:
    replaced(folder / RECIPE, "scheme: ptpc_fp8", "scheme: fp8")


def looser_gate(folder: Path) -> None:
    """A margin that is wider than the recipe's, everywhere where a forger would think of it but the fingerprint."""
    edit(folder / GATE, lambda data: data["policy"]["margins"].update(facts=0.2))


def given_to_the_gate(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What the gate's stage was given is other, with its own fingerprint and those that follow from it."""

    def changed(data: Any) -> None:
        gate, report = data["stages"]["gate"], data["stages"]["report"]
        change(gate["payload"]["settings"])
        gate["fingerprint"] = report["payload"]["inputs"]["gate"] = fingerprint(gate["payload"])
        report["fingerprint"] = fingerprint(report["payload"])

    edit(folder / MANIFEST, changed)


def looser_gate_and_stage(folder: Path) -> None:
    looser_gate(folder)
    given_to_the_gate(folder, lambda settings: settings["policy"]["margins"].update(facts=0.2))


def looser_gate_of_another_version(folder: Path) -> None:
    """Another version may have other margins of a suite, but not another confidence than its recipe."""
    edit(folder / GATE, lambda data: data["policy"].update(confidence=0.5))
    given_to_the_gate(folder, lambda settings: settings["policy"].update(confidence=0.5))
    edit(folder / MANIFEST, lambda data: data.update(quantmint="99.0"))


def gate_without_a_policy(folder: Path) -> None:
    looser_gate(folder)
    given_to_the_gate(folder, lambda settings: settings.pop("policy"))


def better_samples(folder: Path) -> None:
    """Every item right, and the record's digest of the file as well; the record's figures stay."""
    path = folder / "quantmint/samples/facts.candidate.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["samples"]["score"] = [1.0] * len(data["samples"]["score"])
    raw = gzip.compress(json.dumps(data).encode(), mtime=0)
    path.write_bytes(raw)

    def named(data: Any) -> None:
        data["measurements"]["samples"]["facts"]["candidate"]["sha256"] = hashlib.sha256(raw).hexdigest()

    edit(folder / GATE, named)


def other_origin(folder: Path) -> None:
    replaced(folder / PROVENANCE, "c0" * 20, "d0" * 20)


# What is done, which check names it even where quantmint.json is made anew, and in which words.
TAMPERINGS = [
    (flip_a_byte, "gate", "the checkpoint here is"),
    (better_report, "report", "accuracy[0].candidate is 0.97, the evidence says 0.9025"),
    (swapped_numbers, "card", "the card's numbers are not the gate's: facts 90.25 % and 90.00 %"),
    (other_base, "card", "base_model is ['org/other'], quantmint.json says org/llama"),
    (another_scheme, "recipe", "quantization.scheme is 'fp8', quantmint.json says 'ptpc_fp8'"),
    (looser_gate, "gate", "judged by other limits than the recipe's: margins.facts is 0.2, not 0.05"),
    (looser_gate_of_another_version, "gate", "judged by other limits than the recipe's: confidence is 0.5, not 0.95"),
    (looser_gate_and_stage, "gate", "judged by other limits than the recipe's: margins.facts is 0.2, not 0.05"),
    (gate_without_a_policy, "gate", "judged by other limits than the recipe's: margins.facts is 0.2, not 0.05"),
    (better_samples, "gate", "does not follow from its own numbers"),
    (other_origin, "provenance", "is 'd0d0"),
]


def said(check: ReleaseCheck) -> str:
    return "\n".join((check.reason, *check.details))


@pytest.mark.parametrize(("tamper", "name", "words"), TAMPERINGS, ids=lambda value: getattr(value, "__name__", None))
def test_what_was_changed_is_named_whoever_makes_the_manifest(
    signed: Path, keys: Keys, check: Verify, tamper: Tamper, name: str, words: str
) -> None:
    before = {path: path.read_bytes() for path in signed.rglob("*") if path.is_file()}
    tamper(signed)
    changed = [path.relative_to(signed).as_posix() for path, raw in before.items() if path.read_bytes() != raw]
    honest.remanifest(signed)
    checks = check(signed, Trust(key=keys("ours")[1]))
    assert checks[name].outcome is CheckOutcome.FAILS
    assert words in said(checks[name])
    # Its digests agree again, but what was signed were others.
    assert (checks["files"].outcome, checks["digests"].outcome) == (CheckOutcome.OK, CheckOutcome.OK)
    assert checks["signature"].outcome is CheckOutcome.FAILS
    assert all(f"{path} is not what was signed" in said(checks["signature"]) for path in (*changed, MANIFEST))


def test_an_edited_file_has_another_digest(signed: Path, keys: Keys, check: Verify) -> None:
    for tamper in (flip_a_byte, better_report, swapped_numbers):
        tamper(signed)
    checks = check(signed, Trust(key=keys("ours")[1]))
    for name in ("model.safetensors", REPORT, CARD):
        assert f"{name} was changed: it" in said(checks["digests"])
        assert f"{name} is not what was signed" in said(checks["signature"])
    assert checks["files"].outcome is checks["manifest"].outcome is CheckOutcome.OK


def test_a_signature_of_another_model_covers_none_of_this_one(
    signed: Path, keys: Keys, check: Verify, models: Models, quantize: Quantize, tmp_path: Path
) -> None:
    """Signed by the very key that is trusted, over another checkpoint of the same publisher."""
    other = Path(
        shutil.copytree(quantize("llama", "compressed-tensors", kv_cache=False).folder, tmp_path / "llama-other")
    )
    signed_by(other, keys("ours")[0], signed / SIGNATURE)
    for trust in (Trust(key=keys("ours")[1]), Trust(unsigned=True)):
        found = check(signed, trust)["signature"]
        assert found.outcome is CheckOutcome.FAILS
        assert "is not what was signed: it was changed since" in found.reason


def test_a_signature_by_another_key(release: Path, keys: Keys, check: Verify) -> None:
    signed_by(release, keys("theirs")[0], release / SIGNATURE)
    found = check(release, Trust(key=keys("ours")[1]))["signature"]
    assert found.outcome is CheckOutcome.FAILS
    assert "is signed by the key" in found.reason
    assert check(release, Trust(key=keys("theirs")[1]))["signature"].outcome is CheckOutcome.OK


def test_a_signature_that_was_broken_or_taken_away(signed: Path, keys: Keys, check: Verify) -> None:
    trust = Trust(key=keys("ours")[1])
    whole = (signed / SIGNATURE).read_text()
    payload = json.loads(whole)
    raw = payload["dsseEnvelope"]["signatures"][0]["sig"]
    payload["dsseEnvelope"]["signatures"][0]["sig"] = raw[:20] + ("A" if raw[20] != "A" else "B") + raw[21:]
    for text, words in (
        (json.dumps(payload), "was changed, or is not by the key"),
        ("{}", "not a signature"),
        (whole[:100], "not a signature"),
        ("[" * 100_000, "not a signature"),
    ):
        (signed / SIGNATURE).write_text(text)
        found = check(signed, trust)["signature"]
        assert (found.outcome, words in found.reason) == (CheckOutcome.FAILS, True), found.reason
    (signed / SIGNATURE).unlink()
    assert check(signed, trust)["signature"].outcome is CheckOutcome.FAILS
    assert check(signed, Trust())["signature"].outcome is CheckOutcome.NOT_CHECKED


def test_a_file_too_many_and_one_too_few(signed: Path, keys: Keys, check: Verify) -> None:
    (signed / "optimizer.pt").write_bytes(b"\x80\x04")
    (signed / "quantmint" / "NOTES.txt").write_text("hello")
    (signed / "tokenizer.json").unlink()
    checks = check(signed, Trust(key=keys("ours")[1]))
    assert checks["files"].outcome is CheckOutcome.FAILS
    for words in (
        "tokenizer.json is missing",
        "optimizer.pt is there, but not in quantmint.json",
        "quantmint/NOTES.txt is there, but not in quantmint.json",
        "optimizer.pt: a pickle",
    ):
        assert words in said(checks["files"])
    assert "optimizer.pt is not covered by the signature" in said(checks["signature"])
    assert "tokenizer.json was signed, and is not here" in said(checks["signature"])


def test_a_pickle_in_the_manifest_is_still_a_pickle(release: Path, check: Verify) -> None:
    (release / "optimizer.pt").write_bytes(b"\x80\x04")
    (release / "generation_config.json").write_bytes(b"\x80\x04K\x01.")
    honest.remanifest(release)
    found = check(release)["files"]
    assert "optimizer.pt: a pickle" in said(found)
    assert "generation_config.json: a pickle" in said(found)


def test_fingerprints_that_do_not_recompute(release: Path, check: Verify) -> None:
    """A stage's settings are edited: its fingerprint is another one, and with that one the report rests on nothing."""
    data = json.loads((release / MANIFEST).read_text())
    data["stages"]["quantize"]["payload"]["settings"]["scheme"] = "fp8"
    (release / MANIFEST).write_text(json.dumps(data))
    found = check(release)["manifest"]
    assert "stages.quantize.fingerprint is not the fingerprint of its payload" in said(found)
    data["stages"]["quantize"]["fingerprint"] = fingerprint(data["stages"]["quantize"]["payload"])
    (release / MANIFEST).write_text(json.dumps(data))
    found = check(release)["manifest"]
    assert "the report does not rest on stage quantize" in said(found)
    assert "stages.gate was made from a stage that is not listed" in said(found)


def test_a_manifest_of_another_checkpoint(release: Path, check: Verify) -> None:
    honest.remanifest(release, artefact="ab" * 32)
    checks = check(release)
    assert "quantmint.json says abababab" in said(checks["gate"])
    assert checks["provenance"].outcome is CheckOutcome.FAILS
    assert manifests.read(release / MANIFEST).artefact == "ab" * 32


def test_the_gate_judges_what_the_manifest_lists_and_nothing_else(release: Path, quantmint: Quantmint) -> None:
    def told() -> tuple[int, list[str]]:
        ended = quantmint("gate", release, "--json")
        return ended.code, [f["reason"] for f in ended.json["findings"] if f["subject"] == "release"]

    assert told() == (0, [])
    # A record of something else, where it is found first.
    shutil.copy(release / GATE, release / "gate.json")
    shutil.copytree(release / "quantmint" / "samples", release / "samples")
    assert told() == (4, ["gate.json is not the release's record: quantmint.json does not list it."])
    (release / "gate.json").unlink()
    # Other weights under a record that is theirs no more.
    weights = next(release.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole + b"\0")
    code, [reason] = told()
    assert (code, weights.name in reason, "something else was judged" in reason) == (4, True, True)
    weights.write_bytes(whole)
    # A record that was edited, and a list without a checkpoint that is the record's.
    edit(release / GATE, lambda data: {**data, "artefact": "0" * 64})
    code, reasons = told()
    assert (code, len(reasons)) == (4, 2)
    assert "lists it with the SHA-256" in reasons[0]
    assert f"the record about {'0' * 64}" in reasons[1]
    (release / MANIFEST).unlink()
    (release / SIGNATURE).write_text("{}")
    assert [reason.endswith("but has no quantmint.json that lists what was.") for reason in told()[1]] == [True]


def test_a_release_is_compared_with_its_source(
    release: Path, models: Models, quantmint: Quantmint, tmp_path: Path
) -> None:
    """Whoever has the 16-bit model needs to trust nobody: its weights and what lies beside them are compared."""
    alone = quantmint("release", "verify", release, "--unsigned", "--json")
    with_source = quantmint("release", "verify", release, "--unsigned", "--source", models("llama"), "--json")
    assert with_source.code == alone.code
    structure = next(check for check in json.loads(with_source.out)["checks"] if check["name"] == "structure")
    assert structure["outcome"] == "OK"
    assert "least SQNR" in structure["reason"]
    source = tmp_path / "another"
    shutil.copytree(models("llama"), source)
    edit(source / "config.json", lambda config: config["rope_parameters"].update(rope_theta=123.0))
    other = quantmint("release", "verify", release, "--unsigned", "--source", source, "--json")
    assert other.code == 1
    structure = next(check for check in json.loads(other.out)["checks"] if check["name"] == "structure")
    assert "other configuration: config.json: rope_parameters.rope_theta" in structure["reason"]
