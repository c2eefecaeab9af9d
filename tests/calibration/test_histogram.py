from __future__ import annotations

import math

import pytest
import torch

from quantmint.calibration.observers import BINS, Observer, count, least_squares, magnitudes, observer, percentile


def numbers(size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * torch.rand(size, generator=generator).exp2() ** 8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_magnitude_has_a_bin_of_its_own(dtype: torch.dtype) -> None:
    values = magnitudes(dtype)
    finite = values[values.isfinite()].to(dtype)
    assert torch.equal(finite.double(), values[: len(finite)])
    counts = count(torch.cat([finite, -finite]))
    assert counts[: len(finite)].tolist() == [2] * len(finite)
    assert counts.sum() == 2 * len(finite)


def test_parts_add_up_in_any_order_and_size() -> None:
    whole = numbers(4096).view(2, 4, 64, 8)
    parts = sum(count(part) for part in whole.flatten().flip(0).split(1000))
    assert torch.equal(count(whole), parts)
    by_head = count(whole, per_head=True)
    assert by_head.shape == (4, BINS)
    assert torch.equal(by_head[1], count(whole[:, 1]))


def test_more_numbers_than_are_counted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = count(numbers(1000))
    monkeypatch.setattr("quantmint.calibration.observers._CHUNK", 7)
    assert torch.equal(count(numbers(1000)), expected)


def test_float32_is_counted_as_bfloat16() -> None:
    wide = numbers(1000, torch.float32)
    assert torch.equal(count(wide), count(wide.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.001, 50, 99.99, 100])
@pytest.mark.parametrize("size", [1, 1000, 20_000])
def test_a_percentile_is_the_nearest_rank(dtype: torch.dtype, share: float, size: int) -> None:
    tensor = numbers(size, dtype)
    stored = (tensor.bfloat16() if dtype == torch.float32 else tensor).abs().double().sort().values
    rank = -(-size * round(share * 10**6) // 10**8)
    assert percentile(count(tensor), dtype, share).double() == stored[rank - 1]


def lost(tensor: torch.Tensor, amax: float) -> float:
    scale = torch.tensor(amax, dtype=torch.float32) / 448
    x = tensor.float()
    stored = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return float((x - stored).double().square().sum())


@pytest.mark.parametrize("seed", range(6))
def test_least_squares_loses_no_more_than_any_candidate(seed: int) -> None:
    tensor = numbers(5000, seed=seed)
    tensor[0] = 3 * tensor.abs().max()  # worth clipping, or not
    largest = float(tensor.abs().max())
    chosen = float(least_squares(count(tensor), tensor.dtype))
    candidates = [largest * (1 - step / 100) for step in range(51)]
    losses = [lost(tensor, amax) for amax in candidates]
    assert lost(tensor, chosen) == pytest.approx(min(losses), rel=1e-6)
    assert chosen == pytest.approx(candidates[losses.index(min(losses))], rel=1e-6)


def test_least_squares_clips_what_little_is_worth() -> None:
    """A constant that FP8 holds exactly at another scale, and one number a little above it."""
    tensor = torch.full((100_000,), 1.0, dtype=torch.bfloat16)
    tensor[0] = 1.0625
    chosen = least_squares(count(tensor), tensor.dtype)
    assert float(chosen) < 1.0625
    assert lost(tensor, float(chosen)) < lost(tensor, 1.0625)


@pytest.mark.parametrize("name", ["amax", "percentile", "mse"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    tensor = numbers(100_000)
    tensor[5] = bad
    how: Observer = observer(name)  # type: ignore[arg-type]
    assert not how.finish(how.summarise(tensor)).isfinite()
    states = tensor.view(1, 4, 2500, 10)
    assert how.finish(how.summarise(states, per_head=True)).isfinite().tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", ["amax", "percentile", "mse"])
def test_nothing_but_zeros(name: str) -> None:
    how: Observer = observer(name)  # type: ignore[arg-type]
    assert how.finish(how.summarise(torch.zeros(10, dtype=torch.bfloat16))) == 0


@pytest.mark.parametrize("name", ["amax", "percentile", "mse"])
def test_parts_are_combined_in_any_order(name: str) -> None:
    how: Observer = observer(name, share=99.0)  # type: ignore[arg-type]
    tensor = numbers(6000).view(2, 3, 100, 10)
    parts = [how.summarise(part, per_head=True) for part in tensor.split(20, dim=2)]
    forwards, backwards = parts[0], parts[-1]
    for part, other in zip(parts[1:], parts[-2::-1], strict=True):
        forwards, backwards = how.combine(forwards, part), how.combine(backwards, other)
    whole = how.finish(how.summarise(tensor, per_head=True))
    assert whole.shape == (3,)
    assert whole.dtype == torch.float32
    assert torch.equal(how.finish(forwards), whole)
    assert torch.equal(how.finish(backwards), whole)
