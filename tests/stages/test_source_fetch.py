"""Which files of a repository are fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.stages.setting import SourceIdentity
from quantmint.pipeline.stages.source import fetch

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a repository; what is asked of it lands in ``snapshot`` beside it."""
    hub, snapshot = tmp_path / "hub", tmp_path / "snapshot"
    hub.mkdir()
    snapshot.mkdir()

    def download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None = None, **__: Any) -> str:
        names = [path.name for path in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copy(hub / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return hub


def fetched(repository: Path, *names: str, index: object = None, with_code: bool = False) -> set[str]:
    for name in ("config.json", "tokenizer.json", "modeling.py", "README.md", "pytorch_model.bin", *names):
        (repository / name).write_text("{}")
    if index is not None:
        (repository / "model.safetensors.index.json").write_text(json.dumps(index))
    identity = SourceIdentity(None, "a" * 40, "org/name")
    folder = fetch(identity, with_code=with_code, progress=PlainReporter())
    return {path.name for path in folder.iterdir()} - {"config.json", "tokenizer.json", "README.md"}


def test_weights_that_no_index_names_stay_where_they_are(repository: Path) -> None:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    names = fetched(repository, *SHARDS, "consolidated.safetensors", "consolidated-00001.safetensors", index=index)
    assert names == {*SHARDS, "model.safetensors.index.json"}


def test_an_index_may_name_any_file(repository: Path) -> None:
    names = ("consolidated.safetensors", "we[i]ghts.safetensors")
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    assert fetched(repository, *names, "other.safetensors", index=index) == {*names, "model.safetensors.index.json"}


def test_without_an_index_a_second_copy_is_left(repository: Path) -> None:
    assert fetched(repository, "model.safetensors", "consolidated.safetensors") == {"model.safetensors"}
    assert "modeling.py" in fetched(repository, with_code=True)
