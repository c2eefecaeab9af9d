"""Recipes with releases that say what they were made from; the weights themselves are nowhere.

A release here holds a ``quantmint.json`` with the payloads of the plan that the recipe has when it is made: later the
test changes one thing, and sees what is made of it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.manifest import (
    DatasetRecord,
    HardwareRecord,
    Manifest,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.release import MANIFEST, Release, tag_of
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import LOCATION
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.files import File
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.due.due import Due, look
from tests.hub.standin import HubStandIn

RECIPE: Mapping[str, Any] = {
    "description": "A test.",
    "source": {"folder": "model"},
    "quantization": {"scheme": "ptpc_fp8", "kv_cache": "fp8", "format": "compressed-tensors"},
    "calibration": {"set": "sentences.yaml", "samples": 4, "sequence_length": 64, "batch_size": 2, "seed": 0},
    "target": {"hardware": "mi300x", "gpus": 1, "workload": "tiny", "max_model_len": 512},
    "evaluation": {"suite": "tiny", "concurrency": 8},
    "gate": {"accuracy": {"margin": 0.02}},
    "publish": {"folder": "published"},
}
CORE = ("cais/mmlu", "openai/gsm8k", "google/IFEval", "EleutherAI/wikitext_document_level")
"""The data sets of the suite core."""
CONFIG = (
    b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, '
    b'"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, '
    b'"head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": false, "torch_dtype": "float16"}'
)
SILENT = PlainReporter(io.StringIO())
_AFTER = ("package", "sign", "publish")  # what is in no manifest


@dataclass
class World:
    """A working folder. ``vllm`` is the version of the serving environment, None for no such environment."""

    folder: Path
    vllm: str | None = "0.32.0"

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def recipe(self, name: str = "r", **sections: Any) -> Path:
        """Write a recipe: the usual one, with other sections (None: without it)."""
        data = {"name": name, **RECIPE, **sections}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
        return path

    def plan(self, name: str = "r") -> tuple[Setting, tuple[Planned, ...]]:
        setting = open_setting(f"{name}.yaml", store=self.store)
        return setting, build_plan(setting)

    def manifest(
        self, name: str = "r", *, year: int = 2026, hour: int = 12, data: tuple[DatasetRecord, ...] = ()
    ) -> Manifest:
        """What a release of the recipe as it is now says of itself; ``data`` is recorded beside the payloads."""
        setting, plan = self.plan(name)
        when = f"{year}-11-20T{hour:02}:00:00.000Z"
        kept = [planned for planned in plan if planned.key not in _AFTER]
        source, recipe = setting.source, yaml.safe_load(setting.loaded.text_proven)
        commit = source.digest if source.repo is not None else None
        return Manifest(
            name=name,
            title="a test",
            created=when,
            artefact="a" * 64,
            verdict="PASS",
            base=SourceRecord(source.repo, commit, None if commit else source.digest, {"config.json": "a" * 64}),
            recipe=recipe,
            recipe_fingerprint=fingerprint(recipe),
            stages={
                planned.key: StageRecord(
                    planned.fingerprint, planned.stage.version, when, when, {}, dict(planned.payload)
                )
                for planned in kept
            },
            datasets=data,
            tools={},
            serving=ServingRecord("vllm 0.32.0", None),
            hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
            files={},
            quantmint=__version__,
        )

    def release(self, name: str = "r", to: Destination | None = None, **facts: Any) -> str:
        """Publish a release of the recipe as it is now (``to`` None: to its folder); returns its tag."""
        made = self.manifest(name, **facts)
        raw = manifests.encode(made)
        path = self.folder / "made" / hashlib.sha256(raw).hexdigest() / MANIFEST
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        identity = manifests.identity(raw)
        tag = tag_of(datetime.fromisoformat(made.created), identity)
        release = Release(name, tag, identity, made.title, {MANIFEST: File(path, len(raw), identity)})
        target = to or FolderDestination(self.folder / "published", name)
        target.publish(release, candidate=False, progress=SILENT)
        return tag

    def on_hub(self, hub: HubStandIn, repo: str, name: str = "r", **facts: Any) -> str:
        """The same in a repository of the Hub."""
        made = self.manifest(name, **facts)
        raw = manifests.encode(made)
        tag = tag_of(datetime.fromisoformat(made.created), manifests.identity(raw))
        commit = hub.put(repo, {MANIFEST: raw}, tag)
        hub.repo(repo).refs[f"refs/tags/{tag}"] = commit
        return tag

    def finished(self, name: str = "r", verdict: str = "PASS", until: str = "publish", tag: str = "") -> None:
        """Leave in the store what a run leaves, up to a stage; what is kept in a file here is not looked into.

        ``tag`` is of the release that it made ("": the newest in the folder).
        """
        setting, plan = self.plan(name)
        found = FolderDestination(self.folder / "published", name).releases()
        published = [one for one in found if tag in ("", one.tag)]
        result = {"verdict": verdict, "tag": published[0].tag, "identity": published[0].revision} if published else {}
        result |= {"tag": tag} if tag else {}
        for planned in plan:
            with self.store.working(planned.stage.family, planned.fingerprint) as work:
                if work.existing is None:
                    if planned.key == "source":
                        facts = {"folder": str(setting.source.folder), "files": {}}
                        (work.path / LOCATION).write_text(json.dumps(facts))
                    passed = {**result, "verdict": verdict if planned.key == "gate" else "PASS"}
                    started = datetime.now(UTC)
                    work.commit(payload=planned.payload, result=passed, started=started, tools={})
            if planned.key == until:
                return

    def look(self, *recipes: str) -> tuple[Due, ...]:
        return look(recipes or ("r.yaml",), store=self.store)

    def due(self, recipe: str = "r.yaml") -> Due:
        (found,) = self.look(recipe)
        return found
