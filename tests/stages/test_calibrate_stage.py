"""Calibration in a run: by layers and on devices, resumed in its working folder, with what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.calibration import layers
from quantmint.calibration.ranges import load_ranges
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.calibrate import RANGES, CalibrateStage, read_tokens
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.entries import Entry

Run = Callable[..., Entry]


@pytest.fixture
def calibrate(orchestra: Any, models: Callable[..., Path]) -> Run:
    """Run the real stage after a source that is a model of the fixtures; gives what it committed."""

    def run(fields: str = "", *, model: str = "llama", device: str = "cpu") -> Entry:
        Path("words.jsonl").write_text(('{"text": "' + "w7 w8 w9 w20 w300 " * 8 + '"}\n') * 8)
        recipe = Path("r.yaml")
        lines = [line for line in recipe.read_text().splitlines() if not line.startswith("calibration:")]
        lines.append(f"calibration: {{set: sentences.yaml, samples: 4, sequence_length: 16, batch_size: 2{fields}}}")
        recipe.write_text("\n".join(lines) + "\n")
        setting = open_setting("r.yaml", store=orchestra.setting.store)
        orchestra.setting = replace(setting, vllm=orchestra.setting.vllm, device=device)

        def source(job: Job) -> None:
            (job.path / "location.json").write_text(json.dumps({"folder": str(models(model))}))

        stages = orchestra.stage("source", work=source), CalibrateStage()
        orchestra.run(*stages)
        planned = orchestra.plan(*stages)[-1]
        entry: Entry = orchestra.setting.store.find("calibrate", planned.fingerprint)
        return entry

    return run


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer"):
        read_tokens(Calibration(set="tiny"), tmp_path, trust_remote_code=False)


def test_what_it_says_of_itself(calibrate: Run, orchestra: Any) -> None:
    entry = calibrate(", mode: layer, kv_observer: percentile", device="cpu,cpu")
    result = entry.record.result
    assert result["mode"] == "layer"
    assert result["mode_reason"] == "as the recipe asks"
    assert result["devices"] == ["cpu", "cpu"]
    assert result["observation"]["inputs"] == "amax"
    assert result["observation"]["cache"] == "percentile"
    assert result["tokens"] == 64
    assert result["warnings"] == []
    assert any("layer mode on cpu, cpu" in line for line in orchestra.lines)
    assert any("100 % of 8 layer samples" in line for line in orchestra.lines)
    assert [path.name for path in entry.path.iterdir() if path.is_dir()] == []


def test_the_file_is_the_same_by_layers(calibrate: Run, orchestra: Any) -> None:
    # What no dense model has is in the fingerprint all the same, so that both are run.
    layered = calibrate(", mode: layer, min_expert_tokens: 1")
    resident = calibrate(", mode: resident, min_expert_tokens: 2")
    assert layered.path != resident.path
    assert layered.file(RANGES).read_bytes() == resident.file(RANGES).read_bytes()


def test_a_run_that_broke_goes_on_at_its_layer(calibrate: Run, orchestra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_ranges(calibrate(", mode: resident, seed: 2").file(RANGES))
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    done: list[int] = []
    measured = layers.LayerRunner.measured

    def broken(self: Any, layer: int, observation: Any) -> Any:
        if (layer, done) == (1, [0]):
            done.append(layer)
            raise OSError("the machine went away")
        done.append(layer)
        return measured(self, layer, observation)

    monkeypatch.setattr(layers.LayerRunner, "measured", broken)
    with pytest.raises(Exception, match="the machine went away"):
        calibrate(", mode: layer, seed: 2, kv_floor: 0.001")
    done.append(-1)
    found = load_ranges(calibrate(", mode: layer, seed: 2, kv_floor: 0.001").file(RANGES))
    assert done == [0, 1, -1, 1], "the first layer is not run again"
    assert {name: float(amax) for name, amax in found.inputs.items()} == {
        name: float(amax) for name, amax in expected.inputs.items()
    }
