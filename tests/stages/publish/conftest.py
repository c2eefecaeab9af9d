"""A run that passed, up to where it is published: fakes that leave what the real stages leave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.manifest import HardwareRecord, Manifest, ServingRecord, SourceRecord, StageRecord
from quantmint.pipeline.publish.release import CARD, MANIFEST, SIGNATURE, tag_of
from quantmint.pipeline.recipe.sections import Publish
from quantmint.pipeline.stages.gate import checkpoint_digest
from quantmint.pipeline.stages.publish import PublishStage
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.files import File

WriteGate = Callable[..., Path]
SIZE = 2 << 20  # bytes; more than what the store reads at every look
EVIDENT = ("gate", "report", "inspect")


@pytest.fixture
def publish_to(orchestra: Any) -> Callable[..., None]:
    """``publish_to(hub={"repo": "my-org/r"})``: the places of the recipe from now on, here and in every command."""

    def change(**section: Any) -> None:
        told = {"folder": None, **section}
        recipe: Path = orchestra.setting.loaded.path
        recipe.write_text(recipe.read_text().rpartition("publish:")[0] + f"publish: {json.dumps(told)}\n")
        setting: Setting = orchestra.setting
        changed = setting.recipe.model_copy(update={"publish": Publish.model_validate(told)})
        orchestra.setting = replace(setting, loaded=replace(setting.loaded, recipe=changed))

    return change


@pytest.fixture
def stages(orchestra: Any, write_gate: WriteGate) -> Callable[..., list[Any]]:
    """Every stage that publishing starts from, as fakes, and publishing itself. ``option`` makes another checkpoint."""

    def make(
        option: int = 1,
        *,
        numbers: str = "PASS",
        verdict: str = "PASS",
        after: Callable[[Path], None] | None = None,
        artefact: str = "",
    ) -> list[Any]:
        def quantize(job: Job) -> None:
            folder = job.path / "checkpoint"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"option": option}))
            (folder / "model.safetensors").write_bytes(bytes([option]) * SIZE)

        def gate(job: Job) -> None:
            write_gate(job.path, numbers, artefact or checkpoint_digest(job.inputs["quantize"]))
            if after is not None:
                after(job.path)

        def report(job: Job) -> None:
            (job.path / "report.html").write_text(f"<html>{option}")

        packaged: dict[str, object] = {}

        def package(job: Job) -> None:
            packaged.update(assembled(job, option))

        def sign(job: Job) -> None:
            (job.path / SIGNATURE).write_text(f"signed {packaged['identity']}")

        needs = ("quantize", *EVIDENT)
        signed = orchestra.setting.recipe.publish.sign is not None
        given = [numbers, artefact, after is None]
        return [
            orchestra.stage("quantize", option=option, work=quantize),
            orchestra.stage("inspect", "quantize", result={"verdict": "PASS"}, leaves="inspection.json"),
            orchestra.stage(
                "gate", "quantize", option=[*given, verdict], work=gate, leaves="",
                result={"verdict": verdict, "reasons": []},
            ),
            orchestra.stage("report", "gate", work=report, leaves=""),
            orchestra.stage("package", *needs, work=package, result=packaged, leaves=""),
            *([orchestra.stage("sign", "package", work=sign, leaves="")] if signed else []),
            PublishStage(),
        ]  # fmt: skip

    return make


def assembled(job: Job, option: int) -> Mapping[str, object]:
    """Card and manifest over what the fakes left; returns what the real stage leaves as its result."""
    files = {
        (name.removeprefix("checkpoint/") if key == "quantize" else f"quantmint/{name}"): File(
            job.inputs[key].path / name, fact.size, fact.sha256
        )
        for key in ("quantize", *EVIDENT)
        for name, fact in job.inputs[key].record.files.items()
        if key != "quantize" or name.startswith("checkpoint/")
    }
    card = f"---\nlicense: mit\n---\n# Option {option}\n".encode()
    (job.path / CARD).write_bytes(card)
    files[CARD] = File(job.path / CARD, len(card), hashlib.sha256(card).hexdigest())
    day, title = datetime(2026, 11, 20 + option, 12, tzinfo=UTC), f"r with option {option}"
    when = day.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    payload = {"stage": "source", "version": 1, "inputs": {}, "settings": {}, "tools": {}}
    made = Manifest(
        name="r",
        title=title,
        created=when,
        artefact=checkpoint_digest(job.inputs["quantize"]),
        verdict="PASS",
        base=SourceRecord(None, None, "a" * 64, {"config.json": "a" * 64}),
        recipe={"name": "r"},
        recipe_fingerprint=fingerprint({"name": "r"}),
        stages={"source": StageRecord(fingerprint(payload), 1, when, when, {}, payload)},
        datasets=(),
        tools={},
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
        files=manifests.digests(files),
        quantmint="0.1.0",
    )
    raw = manifests.encode(made)
    (job.path / MANIFEST).write_bytes(raw)
    identity = manifests.identity(raw)
    size = sum(file.size for file in files.values())
    return {"identity": identity, "tag": tag_of(day, identity), "title": title, "size": size}
