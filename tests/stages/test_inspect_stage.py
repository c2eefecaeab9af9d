"""A checkpoint that is wrong is stopped in a run with what is wrong about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import InspectionError
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.inspect import InspectStage
from quantmint.pipeline.stages.stage import Job


@pytest.fixture
def stages(orchestra: Any, quantize: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The real inspection between fakes; ``harm`` gets the tensors of the checkpoint that it looks at."""
    made = quantize("llama", "compressed-tensors", kv_cache=False)
    recipe = Path("r.yaml")
    recipe.write_text(recipe.read_text().replace("kv_cache: fp8", "kv_cache: auto"))
    orchestra.setting = replace(open_setting("r.yaml", store=orchestra.setting.store), vllm=orchestra.setting.vllm)

    def make(harm: Callable[[dict[str, Any]], None]) -> list[Any]:
        def source(job: Job) -> None:
            (job.path / "location.json").write_text(json.dumps({"folder": str(made.source.folder)}))

        def write(job: Job) -> None:
            from safetensors.torch import load_file, save_file

            shutil.copytree(made.folder, job.path / "checkpoint")
            path = job.path / "checkpoint" / "model.safetensors"
            tensors = load_file(path)
            harm(tensors)
            save_file(tensors, path, metadata={"format": "pt"})

        return [
            orchestra.stage("source", work=source),
            orchestra.stage("quantize", "source", work=write, result={"tensor_bytes": None}),
            InspectStage(),
            orchestra.stage("serve-candidate", "inspect"),
        ]

    return make


def test_a_sound_checkpoint_goes_on(orchestra: Any, stages: Any) -> None:
    orchestra.run(*stages(lambda tensors: None))
    assert orchestra.ran == ["source", "quantize", "serve-candidate"]


def test_a_harmed_one_is_stopped_and_the_message_names_the_module(orchestra: Any, stages: Any) -> None:
    name = "model.layers.1.mlp.down_proj.weight_scale"

    def harm(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name] * 4

    for _ in range(2):  # found, then from the store
        with pytest.raises(InspectionError, match="is neither served nor published") as stopped:
            orchestra.run(*stages(harm))
        assert "model.layers.1.mlp.down_proj" in stopped.value.message
        assert "inspection.json" in str(stopped.value.hint)
    assert orchestra.ran == ["source", "quantize"]
    assert "model.layers.1.mlp.down_proj" in str(orchestra.last_run.facts["error"])
