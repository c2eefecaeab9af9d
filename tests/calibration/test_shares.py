"""Shares of the batches, measured apart and joined: what one process would have found, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.calibrate import (
    Execution,
    Share,
    ShareOrder,
    calibrate,
    is_finished,
    joined,
    measure_share,
    prepared,
    split,
)
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.layers import LayerRunner
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import run_resident
from quantmint.calibration.replica import load_resident

HERE = {"one": 1 << 40, "another": 1 << 40}


@dataclass
class Silent:
    total: int = 0
    said: list[str] = field(default_factory=list)

    def bar(self, total: int, unit: str) -> Any:
        from contextlib import nullcontext

        def advance(count: int) -> None:
            self.total += count

        return nullcontext(advance)

    def say(self, message: str) -> None:
        self.said.append(message)

    def warn(self, message: str) -> None:
        self.said.append(message)


@dataclass
class InTurn:
    """Places of this process: the last share first, each apart."""

    device: Literal["cpu", "cuda"] = "cpu"
    free: Mapping[str, int] = field(default_factory=lambda: dict(HERE))
    measured: list[int] = field(default_factory=list)
    until: int | None = None

    def measure(self, order: ShareOrder, shares: Sequence[Share]) -> Iterator[Share]:
        for share in reversed(shares):
            if self.until is not None and len(self.measured) == self.until:
                raise CalibrationError("lost")
            measure_share(order, share, "cpu")
            self.measured.append(share.number)
            yield share


def ranges(
    folder: Path, batches: Sequence[torch.Tensor], observation: Observation, work: Path, **options: Any
) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    outcome = calibrate(folder, batches, observation, Execution(["cpu"], work, **options), watcher=Silent())
    outcome.ranges.save(work.with_suffix(".safetensors"))
    return load_file(work.with_suffix(".safetensors"))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resident", "layer"])
@pytest.mark.parametrize(
    ("model", "observation"),
    [
        ("llama", Observation()),
        ("llama", Observation(inputs="mse", cache="percentile", percentile=99.0)),
        ("qwen3-moe", Observation(inputs="mse", experts="routed", min_expert_tokens=200)),
    ],
)
def test_ranges_are_those_of_one_process(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    tmp_path: Path,
    mode: Any,
    model: str,
    observation: Observation,
) -> None:
    batches = blocks[:, :32].split(2)
    alone = ranges(models(model), batches, observation, tmp_path / "alone")
    places = InTurn()
    assert same(ranges(models(model), batches, observation, tmp_path / "work", mode=mode, elsewhere=places), alone)
    assert sorted(places.measured) == list(range(8 if mode == "resident" else 2))
    assert not (tmp_path / "work").exists()


def test_a_finished_share_is_not_measured_again(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path
) -> None:
    batches, work = blocks[:, :16].split(2), tmp_path / "work"
    observation = Observation(cache="mse")
    with pytest.raises(CalibrationError, match="lost"):
        ranges(models("llama"), batches, observation, work, elsewhere=InTurn(until=3))
    # More places than before: the split stays, or nothing that is finished would fit.
    again = InTurn(free=HERE | {"third": 1 << 40})
    found = ranges(models("llama"), batches, observation, work, mode="layer", elsewhere=again)
    assert again.measured == [4, 3, 2, 1, 0]
    assert same(found, ranges(models("llama"), batches, observation, tmp_path / "alone"))


def test_what_is_measured_elsewhere_has_no_relative_path(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()

    class Elsewhere(InTurn):
        def measure(self, order: ShareOrder, shares: Sequence[Share]) -> Iterator[Share]:
            with chdir(tmp_path / "elsewhere"):
                yield from super().measure(order, shares)

    monkeypatch.chdir(tmp_path)
    batches = blocks[:, :16].split(4)
    found = ranges(models("llama"), batches, Observation(), Path("store/work"), elsewhere=Elsewhere())
    assert same(found, ranges(models("llama"), batches, Observation(), tmp_path / "alone"))


def test_a_share_that_cannot_be_seen_is_not_left_out(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path
) -> None:
    class Unseen(InTurn):
        def measure(self, order: ShareOrder, shares: Sequence[Share]) -> Iterator[Share]:
            yield from super().measure(order, shares)
            (order.work / "share-00001.pt").unlink()

    with pytest.raises(CalibrationError, match=r"share-00001\.pt was measured elsewhere, and cannot be seen here"):
        ranges(models("llama"), blocks[:, :16].split(4), Observation(), tmp_path / "work", elsewhere=Unseen())


def test_shares_of_other_threads_are_measured_again(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path
) -> None:
    batches, work, again = blocks[:, :16].split(2), tmp_path / "work", InTurn()
    with pytest.raises(CalibrationError, match="lost"):
        ranges(models("llama"), batches, Observation(), work, elsewhere=InTurn(device="cuda", until=3))
    ranges(models("llama"), batches, Observation(), work, elsewhere=again)
    assert len(again.measured) == 8


def test_a_share_by_layers_goes_on_at_its_layer(
    models: Callable[..., Path], blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ShareOrder(
        models("llama"), tmp_path, Observation(cache="mse"), "layer", None, False, torch.get_num_threads()
    )
    (share,) = prepared(order, [blocks[:2, :16]], 1)
    seen: list[int] = []
    measured = LayerRunner.measured

    def breaks(walk: LayerRunner, layer: int, observation: Observation) -> Measurement:
        seen.append(layer)
        if seen == [0, 1]:
            raise CalibrationError("lost")
        return measured(walk, layer, observation)

    monkeypatch.setattr(LayerRunner, "measured", breaks)
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    with pytest.raises(CalibrationError, match="lost"):
        measure_share(order, share, "cpu")
    assert not is_finished(order, share)
    measure_share(order, share, "cpu")
    assert seen == [0, 1, 1]
    assert is_finished(order, share)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batches.safetensors", "share-00000.pt"]
    alone = run_resident(load_resident(models("llama"), "cpu"), [blocks[:2, :16]], order.observation).finish()
    found = joined(order, [share]).finish()
    assert list(found) == list(alone)
    assert all(torch.equal(amax, alone[key]) for key, amax in found.items())


def test_every_batch_is_in_one_share() -> None:
    for count in (1, 3, 8, 65):
        for places in (1, 3, 8):
            for mode in ("resident", "layer"):
                parts = split(count, places, mode)
                assert sorted(number for part in parts for number in part) == list(range(count))
                assert all(parts)
    assert len(split(64, 8, "resident")) == 32
    assert len(split(64, 8, "layer")) == 8


@pytest.mark.parametrize("name", ["amax", "mse", "percentile"])
def test_what_is_kept_is_what_was_seen(tmp_path: Path, name: Any) -> None:
    observation = Observation(inputs=name, cache=name, experts="routed", min_expert_tokens=5)
    generator = torch.Generator().manual_seed(2)
    again, whole = Measurement(observation), Measurement(observation)
    for _ in range(2):
        one = Measurement(observation)
        entered = torch.randn(7, 16, generator=generator).bfloat16()
        one.input("a.q_proj", entered)
        one.input("a.k_proj", entered)
        one.cached("a", *torch.randn(2, 1, 3, 7, 16, generator=generator).bfloat16())
        one.routed("m.experts.0", 3)
        one.input("m.experts.0.up", entered[:3], expert="m.experts.0")
        with one.every_token():
            one.input("m.experts.0.up", entered, expert="m.experts.0")
        one.routed_only.add("n.experts.1")
        one.save(tmp_path / "kept.pt")
        again.add(Measurement.load(observation, tmp_path / "kept.pt"))
        whole.add(one)
    assert again.finish().keys() == whole.finish().keys()
    assert list(again.finish()) == list(whole.finish())
    assert all(torch.equal(amax, whole.finish()[key]) for key, amax in again.finish().items())
    assert again.tokens == whole.tokens == {"m.experts.0": 6}
    assert again.starved() == whole.starved()
    assert again.routed_only == whole.routed_only
