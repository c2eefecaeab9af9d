"""Resident or layer by layer, on one device or two, in whatever order: the same ranges, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.calibrate import CalibrationOutcome, Execution, calibrate
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import Ranges
from quantmint.calibration.replica import load_resident
from tests.measuring import observe

Same = Callable[[Ranges, Ranges], None]
NAMES = [
    "llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3", "llama4-text", "gpt-oss",
    "gemma3", "llama4", "qwen3-vl-moe", "qwen2-moe",
]  # fmt: skip
OBSERVATIONS = {
    "largest": Observation(),
    "routed percentile": Observation(inputs="percentile", cache="mse", experts="routed", min_expert_tokens=500),
}


@pytest.fixture
def run(tmp_path: Path, listener: Any) -> Callable[..., CalibrationOutcome]:
    def run(folder: Path, batches: list[torch.Tensor], observation: Observation, **more: Any) -> CalibrationOutcome:
        work = tmp_path / "layers"
        execution = Execution(**{"devices": ["cpu"], "work": work, **more})
        listener.done = 0
        outcome = calibrate(folder, batches, observation, execution, watcher=listener)
        assert listener.done == listener.total
        assert not work.exists()
        return outcome

    return run


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_layer_mode_finds_what_resident_mode_finds(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    run: Callable[..., CalibrationOutcome],
    same: Same,
    name: str,
    observation: Observation,
) -> None:
    folder, batches = models(name), list(blocks.split(6))  # the last one is smaller
    reference = observe(load_resident(folder, "cpu"), batches, observation)
    # Backwards, and by two copies of the model with all but one batch's states on disk.
    layered = run(folder, batches[::-1], observation, mode="layer")
    shared = run(folder, batches, observation, mode="layer", devices=["cpu", "cpu"], activation_bytes=100_000)
    assert layered.decision.mode == shared.decision.mode == "layer"
    same(reference, layered.ranges)
    same(reference, shared.ranges)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_two_devices_find_what_one_finds(
    models: Callable[..., Path], blocks: torch.Tensor, run: Callable[..., CalibrationOutcome], same: Same, name: str
) -> None:
    batches = list(blocks.split(4))
    one = run(models(name), batches, Observation(), mode="resident")
    two = run(models(name), batches, Observation(), mode="resident", devices=["cpu", "cpu"])
    three = run(models(name), batches[:2], Observation(), mode="resident", devices=["cpu", "cpu", "cpu"])
    same(one.ranges, two.ranges)
    same(three.ranges, run(models(name), batches[:2], Observation(), mode="resident").ranges)


def test_resident_mode_keeps_what_it_has_when_it_is_interrupted(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    run: Callable[..., CalibrationOutcome],
    same: Same,
    listener: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, batches = models("qwen3-moe"), list(blocks.split(4))
    counts = OBSERVATIONS["routed percentile"]  # which would be others if a batch were counted twice
    monkeypatch.setattr("quantmint.calibration.ranges.RESIDENT_SECONDS", 0.0)
    advances: list[int] = []
    advance = listener.advance

    def interrupted(count: int) -> None:
        advances.append(count)
        if len(advances) == 4:
            raise KeyboardInterrupt

    def told(count: int) -> None:
        advances.append(count)
        advance(count)

    monkeypatch.setattr(listener, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, batches, counts, mode="resident")
    assert advances == [0, 4, 4, 4]
    advances.clear()
    monkeypatch.setattr(listener, "advance", told)
    resumed = run(folder, batches, counts, mode="resident")
    assert advances[0] == 8
    same(observe(load_resident(folder, "cpu"), batches, counts), resumed.ranges)


def test_sequences_of_several_lengths(
    models: Callable[..., Path], blocks: torch.Tensor, run: Callable[..., CalibrationOutcome], same: Same
) -> None:
    batches = [blocks[:4], blocks[4:8, :50], blocks[8:9, :7]]
    reference = observe(load_resident(models("gemma3-text"), "cpu"), batches)
    same(reference, run(models("gemma3-text"), batches, Observation(), mode="layer").ranges)


def test_the_mode_and_its_reason_are_told(
    models: Callable[..., Path], blocks: torch.Tensor, run: Callable[..., CalibrationOutcome], listener: Any
) -> None:
    decision = run(models("llama"), [blocks[:2]], Observation(), devices=["cpu", "cpu"]).decision
    assert decision.mode == "layer"
    assert "the model takes" in decision.reason
    assert listener.said == [f"layer mode on cpu, cpu: {decision.reason}"]
    asked = run(models("llama"), [blocks[:2]], Observation(), mode="resident").decision
    assert (asked.mode, asked.reason) == ("resident", "as the recipe asks")


@pytest.mark.parametrize("mode", ["resident", "layer"])
def test_a_value_that_is_not_finite_is_named_by_its_name_on_disk(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path, run: Callable[..., CalibrationOutcome], mode: str
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(models("mixtral"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named = r"the input of model\.layers\.1\.block_sparse_moe\.experts\.2\.w2 is not finite"
    with pytest.raises(CalibrationError, match=named):
        run(folder, [blocks[:4]], Observation(), mode=mode)
