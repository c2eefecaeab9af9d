from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantmint.pipeline.base.errors import UserError
from tests.publish.conftest import bucket, s3_server
from tests.stages.conftest import FakeVllm, quantmint
from tests.upkeep.due.world import CONFIG, World

__all__ = ["bucket", "quantmint", "s3_server"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A recipe ``r.yaml`` with its model and its calibration texts, and nothing that this machine happens to have."""
    here = tmp_path / "work"
    (here / "model").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("QUANTMINT_STORE", "QUANTMINT_VLLM", "QUANTMINT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    made = World(here)

    def find_vllm(explicit: str | None = None) -> FakeVllm:
        if made.vllm is None:
            raise UserError(f"no vLLM found: {explicit}")
        return FakeVllm(made.vllm)

    monkeypatch.setattr("quantmint.pipeline.runs.session.find_vllm", find_vllm)
    save_file({"weight": np.zeros(1, np.float16)}, here / "model" / "model.safetensors")
    (here / "model" / "config.json").write_bytes(CONFIG)
    (here / "sentences.yaml").write_text("name: sentences\ndescription: Words.\nfile: words.jsonl\ntext: text\n")
    (here / "words.jsonl").write_text('{"text": "one two three"}\n')
    made.recipe()
    return made
