"""Choices under a budget, against all choices that there are; and as what a recipe says them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from random import Random

import pytest

from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.quantize.budget import (
    RESOLUTION,
    Group,
    Option,
    Point,
    Roofline,
    costliest,
    frontier,
    next_try,
    overrides,
    spend,
)
from quantmint.pipeline.recipe.modules import assigned
from quantmint.pipeline.recipe.quantization import Quantization

KINDS = {
    "self_attn.{q_proj, k_proj, v_proj}": (60, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    "self_attn.o_proj": (40, ["self_attn.o_proj"]),
    "mlp.experts.*": (300, [f"mlp.experts.{number}.{part}_proj" for number in (0, 1) for part in ("gate", "up")]),
}


def model(seed: int, layers: int = 12) -> tuple[Group, ...]:
    draw = Random(seed)  # noqa: S311 - figures
    found = []
    for layer in range(layers):
        for kind, (weights, modules) in KINDS.items():
            cost = draw.lognormvariate(0, 2)
            options = (
                Option("mxfp4", cost, 4.25 * weights),
                Option("mxfp4_fp8", cost * draw.uniform(0.3, 1.2), 4.25 * weights),
                Option("ptpc_fp8", cost / 50, 8.03 * weights),
            )
            names = tuple(f"model.layers.{layer}.{module}" for module in modules)
            found.append(Group(f"model.layers.{layer}.{kind}", names, weights, options))
    return tuple(found)


def test_the_frontier_leads_from_the_fewest_bits_to_the_least_cost_and_saves_ever_less_for_a_bit() -> None:
    points = frontier(model(0))
    assert points[0].bits == pytest.approx(4.25)
    assert points[-1].counts == {"ptpc_fp8": 36}
    slopes = [(a.cost - b.cost) / (b.bits - a.bits) for a, b in pairwise(points)]
    assert all(slope > 0 for slope in slopes)
    assert slopes == sorted(slopes, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_is_within_its_budget_and_the_best_of_all(seed: int) -> None:
    groups = model(seed, layers=3)
    weights = sum(group.weights for group in groups)
    for bits in (4.3, 5.0, 6.5):
        point = spend(groups, bits)
        assert point.bits <= bits + 1e-9
        best = min(
            sum(option.cost for option in options)
            for options in product(*(group.options for group in groups))
            if sum(option.bits for option in options) <= bits * weights
        )
        assert point.cost == pytest.approx(best)


def cells(*shapes: tuple[int, int, int]) -> tuple[Cell, ...]:
    return tuple(Cell(f"c{rows}", prompt, answer, rows, 10 * rows, 0) for prompt, answer, rows in shapes)


def test_time_is_the_longer_of_reading_and_multiplying_against_16_bit() -> None:
    machine, groups = hardware("mi355x"), model(0)
    # Tokens one by one are read, a prompt of thousands is multiplied: bits count in one, types of inputs in the other.
    [reading, *_] = Roofline(machine, cells((1, 5000, 1))).timed(groups)
    [multiplying, *_] = Roofline(machine, cells((8000, 8, 800))).timed(groups)
    share = reading.weights / sum(group.weights for group in groups)
    wanted = [share * option.bits / (16 * reading.weights) for option in reading.options]
    assert [o.time for o in reading.options] == pytest.approx(wanted)
    assert [o.time for o in multiplying.options] == pytest.approx([share / 4, share / 2, share / 2], rel=1e-3)
    # Of a mixture's experts one token reads few, and many tokens read all.
    few, many = (Roofline(machine, cells((1, 1, rows)), routed=0.25).timed(groups)[2] for rows in (1, 30))
    assert few.options[0].time < many.options[0].time


def test_a_choice_for_a_speedup_is_as_fast_and_the_best_of_all() -> None:
    groups = Roofline(hardware("mi355x"), cells((1024, 1024, 64), (4096, 256, 128))).timed(model(5, layers=3))
    point = spend(groups, 2.4)
    assert point.speedup is not None
    assert point.speedup >= 2.4
    best = min(
        sum(option.cost for option in options)
        for options in product(*(group.options for group in groups))
        if sum(option.price for option in options) <= 1 / 2.4
    )
    assert point.cost == pytest.approx(best)
    assert "until it was served" in point.spent
    speeds = [each.speedup for each in frontier(groups)]
    assert speeds == sorted(speeds, reverse=True)
    with pytest.raises(UserError, match=r"quantization.speedup: found 4.2, expected at most 3.\d+: .* an estimate"):
        spend(groups, 4.2)


def test_between_two_points_of_the_frontier_of_a_large_model_a_budget_costs_no_more_than_the_first() -> None:
    groups = model(4, layers=120)
    for one, other in zip(frontier(groups)[::20], frontier(groups)[1::20], strict=False):
        assert other.cost < spend(groups, (one.bits + other.bits) / 2).cost <= one.cost * (1 + 1e-9)


def test_a_budget_that_nothing_fits_is_refused_with_what_would() -> None:
    with pytest.raises(UserError, match=r"quantization.bits: found 4.2, expected at least 4.25"):
        spend(model(0), 4.2)


def searched(groups: Sequence[Group], budget: float, count: int, passing: float) -> tuple[list[Point], list[Point]]:
    """The choices that failed and those that passed, where all of at least so many bits pass."""
    failed: list[Point] = []
    passed: list[Point] = []
    while (point := next_try(groups, budget, count, failed, passed)) is not None:
        (passed if point.bits >= passing else failed).append(point)
    return failed, passed


@pytest.mark.parametrize("passing", [4.3, 5.0, 5.9, 6.5, 7.5, 7.9])
def test_a_search_finds_the_fewest_bits_that_pass_to_a_quarter(passing: float) -> None:
    groups = model(1, layers=120)
    failed, passed = searched(groups, 4.5, 10, passing)
    least = min(passed, key=lambda point: point.bits)
    bits = [point.bits for point in (*failed, *passed)]
    assert len(set(bits)) == len(bits), "nothing is tried twice"
    if failed:
        assert least.bits - max(point.bits for point in failed) <= RESOLUTION
    assert len(failed) + len(passed) <= 8


def test_a_search_ends_with_the_least_cost_of_all_where_nothing_passes() -> None:
    groups = model(1, layers=120)
    failed, passed = searched(groups, 4.5, 4, 99.0)
    assert (len(failed), passed) == (4, [])
    assert failed[0] == spend(groups, 4.5)
    assert failed[-1].cost == frontier(groups)[-1].cost
    assert [point.bits for point in failed] == sorted(point.bits for point in failed)
    assert next_try(groups, 4.5, 1, failed[:1], []) is None, "one choice, no search"
    assert searched(groups, 4.5, 4, 0.0) == ([], [spend(groups, 4.5)]), "a first PASS is what was asked for"


def test_overrides_give_every_module_what_was_chosen() -> None:
    groups = model(2)
    point = spend(groups, 5.0)
    default, said = overrides(groups, point.schemes)
    assert len(said) == len(set(point.schemes.values())) - 1
    assert sum(len(one["modules"]) for one in said) <= len(KINDS) * len(said)
    quantization = Quantization.model_validate({"scheme": default, "overrides": said})
    for group in groups:
        assert {assigned(quantization, module) for module in group.modules} == {point.schemes[group.name]}
    # A layer whose number begins alike is another one.
    assert assigned(quantization, "model.layers.100.self_attn.o_proj") == default


def test_the_costliest_groups_are_told_with_their_share_of_what_is_left() -> None:
    groups = model(3)
    point = spend(groups, 5.0)
    found = costliest(groups, point.schemes, most=len(groups))
    assert sum(share for *_, share in found) == pytest.approx(1)
    assert [share for *_, share in found] == sorted((share for *_, share in found), reverse=True)


def test_an_option_on_the_line_between_two_others_is_not_worth_its_price() -> None:
    options = (Option("mxfp4", 3.0, 1.0), Option("mxfp6", 2.0, 2.0), Option("ptpc_fp8", 1.0, 3.0))
    (straight,) = (Group("layer", ("layer",), 1, options),)
    assert [option.scheme for option in straight.hull] == ["mxfp4", "ptpc_fp8"]
    bent = Group("layer", ("layer",), 1, (options[0], Option("mxfp6", 1.9, 2.0), options[2]))
    assert [option.scheme for option in bent.hull] == ["mxfp4", "mxfp6", "ptpc_fp8"]
