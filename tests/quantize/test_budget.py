"""Choices under a budget, against all choices that there are; and as what a recipe says them."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest

from pipeline.base.errors import UserError
from pipeline.quantize.budget import Group, Option, costliest, frontier, overrides, spend, tries
from pipeline.recipe.modules import assigned
from pipeline.recipe.schema import Quantization

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


def test_between_two_points_of_the_frontier_of_a_large_model_a_budget_costs_no_more_than_the_first() -> None:
    groups = model(4, layers=120)
    for one, other in zip(frontier(groups)[::20], frontier(groups)[1::20], strict=False):
        assert other.cost < spend(groups, (one.bits + other.bits) / 2).cost <= one.cost * (1 + 1e-9)


def test_a_budget_that_nothing_fits_is_refused_with_what_would() -> None:
    with pytest.raises(UserError, match=r"quantization.bits: found 4.2, expected at least 4.25"):
        spend(model(0), 4.2)


def test_tries_lead_from_the_budget_to_the_least_cost_each_with_the_same_share_off() -> None:
    groups = model(1)
    found = tries(groups, 4.5, 4)
    assert found[0] == spend(groups, 4.5)
    assert found[-1].cost == frontier(groups)[-1].cost
    assert [point.bits for point in found] == sorted(point.bits for point in found)
    for number, point in enumerate(found[1:], 1):
        wanted = found[0].cost * (found[-1].cost / found[0].cost) ** (number / 3)
        before = frontier(groups)[frontier(groups).index(point) - 1]
        assert point.cost <= wanted * (1 + 1e-9) < before.cost


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
