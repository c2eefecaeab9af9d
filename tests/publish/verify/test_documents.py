"""What a reader is shown says what the evidence says, whoever wrote the manifest over it, and who vouches for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import CARD, CARD_FACTS, MANIFEST, RECIPE, SBOM, SIGNATURE
from quantmint.pipeline.publish.verify.files import Trust
from quantmint.pipeline.publish.verify.subject import CheckOutcome
from tests.hub.standin import HubStandIn
from tests.publish.verify import honest
from tests.publish.verify.conftest import Quantmint, Verify, signed_by
from tests.publish.verify.test_places import release_of
from tests.publish.verify.test_tampering import GATE, edit, replaced, said

Keys = Callable[[str], tuple[Path, Path]]
PAGE = "quantmint/report.html"


def appended(name: str, text: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        (folder / name).write_text((folder / name).read_text() + text)

    return tamper


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def changed(name: str, before: str, after: str) -> Callable[[Path], None]:
    return lambda folder: replaced(folder / name, before, after)


def another_command(folder: Path) -> None:
    """Another command to serve it, in the facts of the card and in the card that is rendered from them."""
    facts = honest.facts_of(folder, manifests.read(folder / MANIFEST))
    first = replace(facts.launches[0], command="pip install vllm-fast; vllm serve x", refusal=None)
    honest.write_card(folder, replace(facts, launches=(first, *facts.launches[1:])))


def another_scheme(folder: Path) -> None:
    """Recipe and manifest ask for INT8, and so does the stage quantize, as the manifest has it."""

    def named(data: dict[str, Any]) -> None:
        data["recipe"]["quantization"]["scheme"] = "int8_w8a8"
        data["recipe_fingerprint"] = fingerprint(data["recipe"])

    replaced(folder / RECIPE, "scheme: ptpc_fp8", "scheme: int8_w8a8")
    edit(folder / MANIFEST, named)


TAMPERINGS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "script": (written(PAGE, "<html><script>alert(1)</script>PASS</html>"), "report", "has an element script"),
    "script beside all figures": (appended(PAGE, "<script>alert(1)</script>"), "report", "has an element script"),
    "handler": (appended(PAGE, "<p onclick=alert(1)>x</p>"), "report", "has the attribute onclick"),
    "image": (appended(PAGE, '<img src="https://example.org/x.png">'), "report", "has an address in src"),
    "words on the page": (appended(PAGE, "<p>5x faster</p>"), "report", "report.html is not what report.json"),
    "empty page": (written(PAGE, ""), "report", "does not show"),
    "empty Markdown": (written("quantmint/report.md", ""), "report", "report.md does not show the verdict"),
    "empty JUnit": (written("quantmint/junit.xml", ""), "report", "junit.xml is not XML"),
    "other words": (appended("quantmint/report.md", "5x faster\n"), "report", "report.md is not what report.json"),
    "empty bill": (written(SBOM, "{}"), "provenance", "it cannot be read"),
    "another bill": (changed(SBOM, '"2.13.0"', '"2.12.0"'), "provenance", "lacks torch 2.13.0"),
    "5x faster": (appended(CARD, "\n5x faster than anything.\n"), "card", "README.md is not what"),
    "licence": (changed(CARD, "license: apache-2.0", "license: mit"), "card", "README.md is not what"),
    "pip install": (appended(CARD, "\n```\npip install other\n```\n"), "card", "README.md is not what"),
    "recipe above another checkpoint": (another_scheme, "recipe", "config.json declares ptpc_fp8"),
    "stage quantize": (another_scheme, "recipe", "scheme is 'int8_w8a8', the stage quantize was given 'ptpc_fp8'"),
    "an unknown headline": (
        lambda folder: edit(folder / GATE, lambda data: data["headlines"].append(
            {"name": "x", "title": "Faster", "promised": 5.0, "measured": 5.0, "unit": "x", "kept": True,
             "source": "", "upto": False})),
        "gate", "has the headline x",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_readers_are_shown_is_what_was_found(release: Path, check: Verify, name: str) -> None:
    tamper, failing, words = TAMPERINGS[name]
    tamper(release)
    honest.forge(release)
    found = check(release)[failing]
    assert (found.outcome, words in said(found)) == (CheckOutcome.FAILS, True), said(found)


def test_commands_are_planned_again(release: Path, quantmint: Quantmint) -> None:
    another_command(release)
    honest.forge(release)
    told = quantmint("release", "verify", release, "--unsigned", "--json")
    failing = {check["name"]: check["reason"] for check in told.json["checks"] if check["outcome"] == "FAILS"}
    assert (told.code, list(failing)) == (1, ["card"])
    assert "are not those that quantmint plans" in failing["card"]


def test_what_another_version_rendered_is_not_checked(release: Path, check: Verify) -> None:
    edit(release / CARD_FACTS, lambda data: data.update(quantmint="0.0.9"))
    honest.forge(release, quantmint="0.0.9")
    checks = check(release)
    for name in ("report", "card"):
        assert checks[name].outcome is CheckOutcome.NOT_CHECKED
        assert "quantmint 0.0.9 rendered" in checks[name].reason
    appended(PAGE, "<script>alert(1)</script>")(release)
    (release / CARD_FACTS).unlink()
    honest.forge(release, quantmint="0.0.9")
    checks = check(release)
    assert (checks["report"].outcome, checks["card"].outcome) == (CheckOutcome.FAILS, CheckOutcome.NOT_CHECKED)


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        (CARD, "| 90.25 % | +0.25 pt", "| 90.25 % | +5.25 pt", "the table Accuracy says +5.25 pt"),
        (CARD, "| 400 |", "| 4,000 |", "the table Accuracy says 4,000 of facts (acc) (Items)"),
        (CARD, "PASS at \N{MINUS SIGN}5.00 pt", "PASS at \N{MINUS SIGN}1.00 pt", "(Verdict at margin)"),
        (CARD, "| Size | **0.", "| Size | **0.1", "the table Measures says"),
        ("quantmint/report.md", "| 400 |", "| 4,000 |", "report.md: the table Accuracy says 4,000"),
    ],
)  # fmt: skip
def test_every_figure_of_a_table_is_compared_in_every_version(
    release: Path, check: Verify, name: str, before: str, after: str, words: str
) -> None:
    text = (release / name).read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert before in text
    (release / name).write_text(text.replace(before, after))
    edit(release / CARD_FACTS, lambda data: data.update(quantmint="0.0.9"))
    honest.forge(release, quantmint="0.0.9")
    checks = check(release)
    found = checks["card" if name == CARD else "report"]
    assert (found.outcome, words in said(found)) == (CheckOutcome.FAILS, True), said(found)


def test_a_measure_that_this_version_does_not_know_is_said(release: Path, check: Verify) -> None:
    changed(CARD, "| Size | **", "| Speedup | **5.00\N{MULTIPLICATION SIGN}** | of all |\n| Size | **")(release)
    edit(release / CARD_FACTS, lambda data: data.update(quantmint="0.0.9"))
    honest.forge(release, quantmint="0.0.9")
    found = check(release)["card"]
    assert (found.outcome, "Measures has Speedup" in said(found)) == (CheckOutcome.NOT_CHECKED, True), said(found)


def test_libraries_that_render_otherwise_are_no_contradiction(
    release: Path, check: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(release / CARD_FACTS, lambda data: data["tools"].update(jinja2="2.0"))
    appended(CARD, "\n")(release)
    honest.forge(release)
    found = check(release)["card"]
    assert (found.outcome, "jinja2 was 2.0" in found.reason) == (CheckOutcome.NOT_CHECKED, True)


def test_an_unsigned_release_is_consistent_and_not_verified(release: Path, quantmint: Quantmint) -> None:
    told = quantmint("release", "verify", release, "--unsigned")
    assert (told.code, told.out.split("  ")[0]) == (0, "CONSISTENT, UNSIGNED")
    assert "VERIFIED" not in told.out
    assert quantmint("release", "verify", release, "--unsigned", "--json").json["conclusion"] == "CONSISTENT, UNSIGNED"


def test_a_signature_by_a_stranger_is_not_accepted(release: Path, quantmint: Quantmint, keys: Keys) -> None:
    signed_by(release, keys("theirs")[0], release / SIGNATURE)
    told = quantmint("release", "verify", release, "--unsigned")
    assert (told.code, "--unsigned accepts no signature" in told.out) == (3, True)
    known = quantmint("release", "verify", release, "--key", keys("theirs")[1])
    assert (known.code, known.out.startswith("VERIFIED")) == (0, True)


@pytest.mark.slow
def test_a_card_that_says_signed_without_a_signature(release: Path, check: Verify) -> None:
    for text in ("model_signing verify key x", "quantmint release verify my-org/llama-ptpc --key PUBLIC_KEY"):
        card = (release / CARD).read_text()
        (release / CARD).write_text(f"{card}\n{text} \n")
        for trust in (Trust(), Trust(unsigned=True)):
            found = check(release, trust)["signature"]
            assert (found.outcome, "the signature was taken away" in found.reason) == (CheckOutcome.FAILS, True)
        (release / CARD).write_text(card)


@pytest.mark.slow
def test_another_release_of_the_same_signer(
    signed: Path, keys: Keys, quantmint: Quantmint, hub: HubStandIn, tmp_path: Path
) -> None:
    """It is whole, and signed by whom the reader trusts: it only lies where another one should."""
    key = ("--key", keys("ours")[1])
    assert quantmint("release", "verify", signed, *key, "--name", "llama-ptpc").code == 0
    other = quantmint("release", "verify", signed, *key, "--name", "llama70b-ptpc")
    assert (other.code, "this is the release llama-ptpc, not llama70b-ptpc" in other.out) == (1, True)
    release = release_of(signed)
    FolderDestination(tmp_path / "published", "llama-ptpc").publish(release, candidate=False, progress=PlainReporter())
    for folder in ("published/llama-ptpc", f"published/llama-ptpc@{release.tag}"):
        assert quantmint("release", "verify", tmp_path / folder, *key).code == 0
    FolderDestination(tmp_path / "published", "mistral").publish(release, candidate=False, progress=PlainReporter())
    for folder in ("published/mistral", f"published/mistral@{release.tag}"):
        other = quantmint("release", "verify", tmp_path / folder, *key)
        assert (other.code, "this is the release llama-ptpc, not mistral" in other.out) == (1, True)
        assert quantmint("release", "verify", tmp_path / folder, *key, "--name", "llama-ptpc").code == 0


@pytest.mark.slow
def test_another_release_in_a_repository(signed: Path, keys: Keys, quantmint: Quantmint, hub: HubStandIn) -> None:
    def published(data: Any) -> None:
        report = data["stages"]["report"]
        report["payload"]["settings"]["published"] = "my-org/llama-ptpc"
        report["fingerprint"] = fingerprint(report["payload"])

    edit(signed / MANIFEST, published)
    honest.forge(signed)
    signed_by(signed, keys("ours")[0], signed / SIGNATURE)
    for repo, code in (("my-org/llama-ptpc", 0), ("my-org/mistral-ptpc", 1)):
        HubDestination(repo).publish(release_of(signed), candidate=False, progress=PlainReporter())
        told = quantmint("release", "verify", repo, "--key", keys("ours")[1])
        assert (told.code, "my-org/llama-ptpc, not my-org/mistral-ptpc" in told.out) == (code, code == 1), told.out


def test_the_commands_json_holds_the_conclusion(signed: Path, keys: Keys, quantmint: Quantmint) -> None:
    told = quantmint("release", "verify", signed, "--key", keys("ours")[1], "--json")
    assert json.loads(told.out)["conclusion"] == "VERIFIED"
