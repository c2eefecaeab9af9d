"""The facts of a card out of entries: what each stage recorded, and nothing of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.publish.card import CardFacts, eval_results, render
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.sections import Publish
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.card import gather, settings
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.entries import Entry, EntryRecord, FileFact
from quantmint.pipeline.store.tree import Store
from tests.eval.report import made as reports


class Telling:
    """Progress that keeps warnings."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def warn(self, message: str) -> None:
        self.told.append(message)


def entry(folder: Path, stage: str, **changes: Any) -> Entry:
    files = {
        path.relative_to(folder).as_posix(): FileFact(path.stat().st_size, sha256_of(path), 0)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    values: dict[str, Any] = {
        "payload": {"stage": stage, "version": 1, "settings": {}, "inputs": {}}, "result": {}, "tools": {},
        "started": "2026-11-21T11:00:00.000Z", "finished": "2026-11-21T12:00:00.000Z",
    }  # fmt: skip
    return Entry(
        stage, "0" * 64, folder, EntryRecord(stage, "0" * 64, files=files, duration_s=1.0, **{**values, **changes})
    )


@pytest.fixture
def job(quantize: Callable[..., Any], tmp_path: Path) -> Callable[..., Job]:
    """A job over a real checkpoint of a small Llama, whose report has the figures of `tests.eval.report.made`."""
    made = quantize("llama", "compressed-tensors")

    def make(*, card: str | None = None, publish: Publish | None = None, repo: str | None = None) -> Job:
        source, inspect, gate, report = (tmp_path / name for name in ("source", "inspect", "gate", "report"))
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        if card is not None:
            (model / "README.md").write_text(card, encoding="utf-8")
        for folder in (source, inspect, gate, report):
            folder.mkdir(exist_ok=True)
        (source / "location.json").write_text(json.dumps({"folder": str(model)}))
        inspection = inspect_checkpoint(made.checkpoint, made.structure, source=made.source).to_json()
        (inspect / "inspection.json").write_text(json.dumps(inspection))
        (report / "report.json").write_text(json.dumps(reports.good()))
        setting = open_setting("tiny-ptpc-fp8kv", store=Store(tmp_path / "store"))
        recipe = setting.recipe.model_copy(update={"publish": publish or setting.recipe.publish})
        setting = replace(setting, loaded=replace(setting.loaded, recipe=recipe))
        if repo is not None:
            setting = replace(setting, source=replace(setting.source, folder=None, digest="a" * 40, repo=repo))
        texts = {"set": {"repo": "org/texts", "revision": "b" * 40, "file": None}, "samples": 64}
        inputs = {
            "source": entry(source, "source"),
            "quantize": entry(made.folder.parent, "quantize"),
            "inspect": entry(inspect, "inspect"),
            "gate": entry(gate, "gate"),
            "report": entry(report, "report"),
            "calibrate": entry(
                tmp_path / "calibrate", "calibrate", payload={"settings": texts}, result={"tokens": 16384}
            ),
        }
        progress: Any = Telling()
        servers: Any = None
        return Job(setting, tmp_path, inputs, progress, servers)

    return make


def test_every_stage_has_its_say(job: Callable[..., Job]) -> None:
    facts = gather(job(card="---\nlicense: mit\nlanguage: en\n---\n# Base\n"))
    assert (facts.name, facts.repo, facts.judged) == ("tiny-ptpc-fp8kv", None, "2026-11-21T12:00:00.000Z")
    assert (facts.base.name, facts.base.repo, facts.base.architecture) == ("tiny/model", None, "LlamaForCausalLM")
    assert facts.quantization.schemes == {"ptpc_fp8": 14}
    assert facts.quantization.unquantized == ("lm_head",)
    assert facts.quantization.calibration is not None
    assert asdict(facts.quantization.calibration) == {
        "name": "tiny", "samples": 64, "sequence_length": 256, "dataset": "org/texts", "revision": "b" * 40,
        "sha256": None, "tokens": 16384,
    }  # fmt: skip
    assert (facts.terms.id, facts.terms.name) == ("mit", "MIT License")
    assert [launch.target for launch in facts.launches] == ["cpu:1", "mi300x:1", "mi355x:1"]
    assert {launch.vllm for launch in facts.launches} == {"0.32.0"}  # what was measured, not the newest


def test_nothing_of_this_machine_is_on_the_card(job: Callable[..., Job], tmp_path: Path) -> None:
    first, again = gather(job()), gather(job())
    assert render(first) == render(again)
    assert eval_results(first) == eval_results(again)
    assert str(tmp_path) not in render(first)
    assert str(Path.home()) not in render(first)


def test_a_repository_is_named_with_its_commit(job: Callable[..., Job]) -> None:
    publish = Publish.model_validate({"hub": {"repo": "my-org/Tiny-FP8"}, "sign": {"keyless": True}})
    facts = gather(job(card="---\nlicense: apache-2.0\n---\n", publish=publish, repo="org/base"))
    assert (facts.base.repo, facts.base.commit, facts.base.digest) == ("org/base", "a" * 40, None)
    assert (facts.repo, facts.title, facts.signed) == ("my-org/Tiny-FP8", "Tiny-FP8", "keyless")
    assert "vllm serve my-org/Tiny-FP8 " in facts.launches[0].command


def test_what_a_card_depends_on_beside_the_entries(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(setting: Setting, **publish: Any) -> Setting:
        section = Publish.model_validate({**setting.recipe.publish.model_dump(), **publish})
        recipe = setting.recipe.model_copy(update={"publish": section})
        return replace(setting, loaded=replace(setting.loaded, recipe=recipe))

    setting = job().setting
    found = [
        settings(setting),
        settings(changed(setting, hub={"repo": "o/n"})),
        settings(changed(setting, licence={"id": "mit"})),
        settings(changed(setting, sign={"key": "k.pem"})),
    ]
    assert len({json.dumps(one) for one in found}) == 4
    assert settings(changed(setting, folder="elsewhere")) == found[0]


def test_facts_are_plain_values(job: Callable[..., Job]) -> None:
    facts: CardFacts = gather(job())
    assert json.loads(json.dumps(asdict(facts), default=Quantization.model_dump))["name"] == "tiny-ptpc-fp8kv"
