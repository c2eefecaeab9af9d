"""What is read from a `quantmint.json` that came from somewhere else is whole, typed and safe, or nothing of it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.manifest import (
    DatasetRecord,
    FileDigest,
    HardwareRecord,
    Manifest,
    ManifestError,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE
from quantmint.pipeline.store.files import File

A, B = "a" * 64, "b" * 64
WHEN = "2026-11-21T12:00:04.445Z"


def made(key: str, inputs: dict[str, str], settings: dict[str, Any] | None = None) -> StageRecord:
    payload = {"stage": key, "version": 1, "inputs": inputs, "settings": settings or {}, "tools": {}}
    return StageRecord(fingerprint(payload), 1, WHEN, WHEN, {}, payload)


@pytest.fixture
def manifest() -> Manifest:
    stages = {"source": made("source", {}, {"sha256": A})}
    for key in ("quantize", "inspect", "gate", "report"):
        stages[key] = made(key, {name: stage.fingerprint for name, stage in stages.items()})
    recipe = {"name": "r", "gate": {"margin": 0.01}}
    return Manifest(
        name="r",
        title="a 16-bit model in FP8",
        created=WHEN,
        artefact=B,
        verdict="PASS",
        base=SourceRecord(None, None, A, {"config.json": B}),
        recipe=recipe,
        recipe_fingerprint=fingerprint(recipe),
        stages=stages,
        datasets=(
            DatasetRecord("calibration", "tiny", None, A),
            DatasetRecord("evaluation", "org/facts", "c" * 40, None),
        ),
        tools={"torch": "2.13.0"},
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
        files={"config.json": FileDigest(3, A), "quantmint/gate.json": FileDigest(0, B)},
        quantmint="0.1.0",
    )


Edited = Callable[[Callable[[dict[str, Any]], object]], bytes]


@pytest.fixture
def edited(manifest: Manifest) -> Edited:
    """The bytes of a manifest after an edit."""

    def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
        data = json.loads(manifests.encode(manifest))
        change(data)
        return json.dumps(data).encode()

    return edit


def test_what_is_written_is_read_again(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_bytes(manifests.encode(manifest))
    assert manifests.read(path) == manifest
    assert manifests.contradictions(manifests.read(path)) == ()


def test_the_same_content_gives_the_same_bytes(manifest: Manifest) -> None:
    other = replace(
        manifest, files=dict(reversed(manifest.files.items())), recipe=dict(reversed(manifest.recipe.items()))
    )
    assert manifests.encode(other) == manifests.encode(manifest)


def test_neither_itself_nor_the_signature_is_listed() -> None:
    file = File(Path("anywhere"), 3, A)
    assert manifests.digests({MANIFEST: file, SIGNATURE: file, "config.json": file}) == {
        "config.json": FileDigest(3, A)
    }


def listing(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.update(files={name: {"size": 1, "sha256": A} for name in names})


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../b", "/etc/passwd", "", ".", "a//b", "a/", "./a", "..", "a\\b", "C:x", "a\nb", "a\0b", "a.", "a ",
     "x" * 256, "\u0085/\x7f", "a/b*"],
)  # fmt: skip
def test_a_name_that_is_not_safe(edited: Edited, name: str) -> None:
    for change in (listing(name), lambda data: data["base"].update(files={name: A})):
        with pytest.raises(ManifestError, match="file name"):
            manifests.decode(edited(change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.update(schema=2), "schema 2, this version of quantmint reads 1"),
        (lambda data: data.pop("schema"), "schema None"),
        (lambda data: data.update(extra=1), "extra"),
        (lambda data: data.pop("artefact"), "artefact"),
        (lambda data: data.update(artefact="A" * 64), "artefact"),
        (lambda data: data.update(verdict="FAIL"), "verdict"),
        (lambda data: data.update(created="yesterday"), "created"),
        (lambda data: data["files"]["config.json"].update(size="3"), "files.config.json.size"),
        (lambda data: data["files"]["config.json"].update(size=-1), "files.config.json.size"),
        (lambda data: data["files"]["config.json"].update(size=True), "files.config.json.size"),
        (lambda data: data["files"]["config.json"].update(mode=7), "files.config.json.mode"),
        (lambda data: data["datasets"][0].update(role="training"), "datasets.0.role"),
        (lambda data: data["base"].update(commit="main"), "base.commit"),
        (lambda data: data.update(files=[]), "files"),
    ],
)
def test_what_is_wrong_is_named(edited: Edited, change: Callable[[dict[str, Any]], object], told: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifests.decode(edited(change))
    assert told in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"\xff", b'{"schema": 1, "schema": 1}', b'{"schema": NaN}', b"[" * 100_000,
     b'{"schema": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_what_is_no_manifest_at_all(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        manifests.decode(raw)


def test_a_key_that_comes_twice_hides_nothing(manifest: Manifest) -> None:
    """Of two equal keys most readers take the last: a second list of files would be the one that is checked."""
    raw = manifests.encode(manifest).replace(b'"files": {', b'"files": {}, "files": {', 1)
    with pytest.raises(ManifestError, match="'files' twice"):
        manifests.decode(raw)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["recipe"]["gate"].update(margin=0.5), "recipe_fingerprint"),
        (lambda data: data["stages"]["gate"]["payload"].update(settings={"margin": 1}), "stages.gate.fingerprint"),
        (lambda data: data["stages"].pop("source"), "stages lacks source"),
        (lambda data: data["stages"].pop("source"), "stages.gate was made from a stage that is not listed"),
        (lambda data: data["base"].update(sha256=B), "base is not"),
        (lambda data: data.update(created="2026-11-22T12:00:04.445Z"), "created"),
        (lambda data: data.update(name="s"), "name"),
        (lambda data: data["stages"]["gate"].update(version=2), "stages.gate.version"),
    ],
)
def test_what_does_not_agree_with_itself(edited: Edited, change: Callable[[dict[str, Any]], object], told: str) -> None:
    found = manifests.contradictions(manifests.decode(edited(change)))
    assert any(told in sentence for sentence in found), found
