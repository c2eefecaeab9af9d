"""How sampled answers are asked for: as generation_config.json says, with a seed where vLLM bears one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.eval import reasoning
from quantmint.pipeline.recipe.endpoints import Reasoning
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.reasoning import ReasoningStage, sampling
from quantmint.pipeline.store.tree import Store


def test_samples_are_drawn_as_the_model_says(tmp_path: Path) -> None:
    assert sampling(tmp_path, Reasoning()) == {"temperature": 1.0}
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert sampling(tmp_path, Reasoning()) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling(tmp_path, Reasoning(temperature=0.2))["temperature"] == 0.2


@pytest.mark.parametrize(("hardware", "seeds"), [("cpu", 1), ("mi300x", 2)])
def test_problems_have_seeds_of_their_own_except_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: str, seeds: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        f"name: r\nextends: tiny-ptpc\ntarget: {{hardware: {hardware}}}\nevaluation: {{reasoning: auto}}\n"
        "gate: {reasoning: {score: null, cut: null, loops: null}}\n"
    )
    setting = open_setting("r.yaml", store=Store(tmp_path / "store"))
    stage = ReasoningStage("baseline")
    found = {json.dumps(stage.item_request(setting, item)) for item in reasoning.generated(2, seed=1)}
    assert len(found) == seeds
    assert ("{}" in found) == (hardware == "cpu")
