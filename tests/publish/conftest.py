"""Releases as they are published: small files, and a manifest that the strict reader takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.canonical import fingerprint
from pipeline.publish import manifest as manifests
from pipeline.publish.manifest import Base, Hardware, Made, Manifest, Serving
from pipeline.publish.release import MANIFEST, SIGNATURE, File, Release, tag_of

MakeRelease = Callable[..., Release]
_A = "a" * 64


@pytest.fixture
def make_release(tmp_path: Path) -> MakeRelease:
    """``make_release("one", day=21)``: a release named ``r`` whose contents begin with "one".

    ``files`` adds contents by name; ``signed`` adds a signature, which no digest covers. The same arguments lead to the
    same release, written anew.
    """

    def make(content: str, *, day: int = 21, files: Mapping[str, bytes] | None = None, signed: str = "") -> Release:
        root = tmp_path / "store" / f"{content}-{day}"
        names = ("config.json", "model.safetensors", "quantmint/gate.json", "quantmint/samples/a.json")
        contents = {name: f"{content} {name} ".encode() * 50 for name in names} | dict(files or {})
        held = {name: _written(root / name, data) for name, data in contents.items()}
        moment = datetime(2026, 11, day, 12, tzinfo=UTC)
        raw = manifests.encode(_manifest(content, moment, held))
        held[MANIFEST] = _written(root / MANIFEST, raw)
        if signed:
            held[SIGNATURE] = _written(root / SIGNATURE, signed.encode())
        identity = manifests.identity(raw)
        return Release("r", tag_of(moment, identity), identity, f"the model {content}", held)

    return make


def _written(path: Path, data: bytes) -> File:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return File(path, len(data), hashlib.sha256(data).hexdigest())


def _manifest(content: str, moment: datetime, files: Mapping[str, File]) -> Manifest:
    when = moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    payload = {"stage": "source", "version": 1, "inputs": {}, "settings": {"sha256": _A}, "tools": {}}
    recipe = {"name": "r"}
    return Manifest(
        name="r",
        title=f"the model {content}",
        created=when,
        artefact=_A,
        verdict="PASS",
        base=Base(None, None, _A, {"config.json": _A}),
        recipe=recipe,
        recipe_fingerprint=fingerprint(recipe),
        stages={"source": Made(fingerprint(payload), 1, when, when, {}, payload)},
        datasets=(),
        tools={},
        serving=Serving("vllm 0.32.0", None),
        hardware=Hardware(None, "AMD Instinct MI300X", "mi300x"),
        files=manifests.digests(files),
        quantmint="0.1.0",
    )
