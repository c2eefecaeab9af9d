"""Compensation: what least squares changes, the share of it that held-out tokens support, and its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantmint.calibration.hessians import HeldOutRows, InputStatistics
from quantmint.pipeline.quantize.gptq.compensation import compensate, least_squares_change
from quantmint.pipeline.quantize.gptq.runner import held_out_rows
from quantmint.pipeline.quantize.gptq.weights import InputGroup

Rows = tuple[torch.Tensor, torch.Tensor]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group_of(weight: torch.Tensor, fitted: Rows, held_out: Rows) -> InputGroup:
    """Return a group of one weight by rows to fit it to and held-out rows, each inputs and errors of products."""
    inputs, errors = fitted
    statistics = InputStatistics(("o_proj",), inputs.t() @ inputs, len(inputs), output_gap=inputs.t() @ errors)
    members: Any = (object(),)
    return InputGroup(replace(statistics, held_out=(HeldOutRows(*held_out),)), members, (weight,))


def lost(weight: torch.Tensor, target: torch.Tensor, rows: Rows) -> float:
    inputs, errors = rows
    return float((errors - inputs @ (target - weight).t()).square().sum())


def test_least_squares_change_makes_up_for_inputs_that_lack_something() -> None:
    weight, inputs = random(16, 64, seed=3), random(2000, 64, seed=4) @ random(64, 64, seed=5)
    rows = (inputs * 0.2).round() / 0.2
    errors = (inputs - rows) @ weight.t() + random(2000, 16, seed=6)
    change = least_squares_change(rows.t() @ rows, rows.t() @ errors)
    assert lost(weight, weight + change, (rows, errors)) < lost(weight, weight + change / 2, (rows, errors))
    assert lost(weight, weight + change / 2, (rows, errors)) < lost(weight, weight, (rows, errors))
    assert not least_squares_change(rows.t() @ rows, torch.zeros(64, 16)).any()


def test_what_held_out_rows_share_is_compensated_and_the_hessian_is_of_all_rows() -> None:
    weight, inputs, change = random(8, 32, seed=0), random(600, 32, seed=1), 0.05 * random(8, 32, seed=2)
    errors = inputs @ change.t()
    fitted, held_out = (inputs[:500], errors[:500]), (inputs[500:], errors[500:])
    moved = compensate(group_of(weight, fitted, held_out), 0.5, lambda _: 1.0)
    assert moved.targets is not None
    assert moved.compensation == (pytest.approx(0.5, rel=0.02),)
    torch.testing.assert_close(moved.targets[0], weight + change / 2, atol=0.03, rtol=0)
    summed = sum(rows.t() @ rows for rows in (inputs[:500], inputs[500:]))  # in the same order, to the same last bits
    torch.testing.assert_close(moved.statistics.hessian, summed)


def test_what_a_narrow_text_taught_by_heart_is_not_compensated() -> None:
    """A few tokens over and over, each with an error of its own, that other tokens do not have."""
    kinds, errors = random(20, 64, seed=0), random(20, 8, seed=1)
    fitted = kinds[:16].repeat(40, 1), errors[:16].repeat(40, 1)
    held_out = kinds[16:].repeat(20, 1), errors[16:].repeat(20, 1)
    weight = random(8, 64, seed=2)
    by_heart = compensate(group_of(weight, fitted, fitted), 1.0, lambda _: 10.0)
    assert by_heart.targets is not None
    assert lost(weight, by_heart.targets[0], held_out) > lost(weight, weight, held_out)
    plain = compensate(group_of(weight, fitted, held_out), 1.0, lambda _: 10.0)
    target = weight if plain.targets is None else plain.targets[0]
    assert lost(weight, target, held_out) <= lost(weight, weight, held_out)
    assert plain.compensation is not None
    assert plain.compensation[0] < 0.1 < 0.9 < float((by_heart.compensation or [0])[0])


def test_too_few_held_out_rows_support_nothing() -> None:
    weight, inputs = random(8, 32, seed=0), random(500, 32, seed=1)
    fitted = inputs, inputs @ random(32, 8, seed=2)
    assert compensate(group_of(weight, fitted, (inputs[:31], fitted[1][:31])), 0.5, lambda _: 1.0).targets is None


def test_no_row_moves_further_than_its_reach() -> None:
    weight, inputs = random(8, 64, seed=0), random(500, 4, seed=1) @ random(4, 64, seed=2)  # of low rank
    rows = inputs, 100 * inputs @ random(64, 8, seed=3)
    moved = compensate(group_of(weight, rows, rows), 0.5, lambda _: 0.25)
    assert moved.targets is not None
    norms = (moved.targets[0] - weight).norm(dim=1) / weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.full((8,), 0.25))


def test_held_out_tokens_are_in_no_other_row() -> None:
    batches = [torch.randint(0, 300, (4, 64), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    numbers = held_out_rows(batches)
    apart = torch.cat([batch.flatten()[rows] for batch, rows in zip(batches, numbers, strict=True)])
    every = torch.cat([batch.flatten() for batch in batches])
    assert 0.9 * len(every) // 8 <= len(apart) <= len(every) // 8
    assert int(torch.isin(every, apart).sum()) == len(apart)


def test_tokens_that_are_a_large_part_of_the_text_are_not_held_out() -> None:
    assert held_out_rows([torch.arange(256).reshape(4, 64) % 6])[0].tolist() == []
