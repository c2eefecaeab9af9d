"""What may help after a FAIL: which layers cost most in few bits, what to paste, how to ask the tasks all the same.

What layers cost is only known where it was measured, by `scheme: auto` or `quantmint search`: the errors of weights,
which every run records, order layers no better than chance (docs/four-bits.md). Else the command that measures is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.hardware import hardware, refusal
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.budget import Group, Point, costliest, frontier, overrides
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.recipe.load import choice_yaml
from quantmint.pipeline.recipe.modules import assigned, matches
from quantmint.pipeline.recipe.schema import AUTO, Quantization, Recipe
from quantmint.pipeline.stages.sensitivity import spendable
from quantmint.pipeline.stages.stage import Setting

FROM = ("mxfp4", "mxfp4_fp8", "ptpc_fp8")
"""What is chosen from where nothing else is said."""
_EIGHT = "ptpc_fp8"
_ROWS = 5
_MORE = 0.75
"""Bits a weight above the fewest that a first budget has: where most of what four bits lose is won back."""


@dataclass(frozen=True, slots=True)
class Advice:
    """``lines`` of prose, and a block to ``paste`` into the recipe, which is empty where nothing was measured."""

    lines: tuple[str, ...] = ()
    paste: str = ""


def advise(
    setting: Setting,
    groups: Sequence[Group] | None = None,
    *,
    verdict: Verdict | None = Verdict.FAIL,
    stopped: str | None = None,
) -> Advice:
    """What to do about a verdict; ``groups`` as far as they were measured, ``stopped`` by which stage, if by one.

    Nothing after a PASS, nor where the tasks were asked and could not tell.
    """
    if verdict is not Verdict.FAIL and stopped is None:
        return Advice()
    found = _precision(setting, groups)
    if verdict is Verdict.FAIL and stopped is not None:
        lines = (*found.lines, "no task was asked; to ask them all the same, `gate: {canary: null}`")
        return replace(found, lines=lines)
    return found


def choices(recipe: Recipe) -> tuple[str, ...]:
    """The schemes that `scheme: auto` could have in the place of this recipe's: its own, and those that fit beside."""
    made, target = recipe.quantization, recipe.target.hardware
    served = recipe.evaluation.runtime != "reference" or hardware(target).kind != "cpu"
    return tuple(
        name
        for name in dict.fromkeys([*sorted(made.schemes), *FROM])
        if "stream" in scheme(name).engines
        and scheme(name).refusal(made.engine, made.format) is None
        and made.format in scheme(name).formats
        and not (served and refusal(target, name, made.kv_cache, made.format))
    )


def _precision(setting: Setting, groups: Sequence[Group] | None) -> Advice:
    recipe = setting.recipe
    point = None if setting.chosen is None else setting.chosen.point
    if groups is not None and point is not None:
        return Advice(tuple(_more_bits(spendable(setting, tuple(groups)), point)))
    if all(scheme(name).bits_per_weight >= scheme(_EIGHT).bits_per_weight for name in recipe.quantization.schemes):
        return Advice(
            ("all is in 8 bit; what loses most may stay in 16 by `quantization: {exclude: [...]}`: see its errors",)
        )
    if groups is not None:
        return in_eight(recipe.quantization, groups)
    lines: list[str] = []
    own, texts = recipe.quantization, "" if recipe.calibration else ", with `calibration: {set: ultrachat}`"
    gptq = algorithm("gptq")
    if own.algorithm == "none" and any(gptq.refusal(own.engine, name) is None for name in own.schemes):
        lines.append(f"at the same bits GPTQ loses less than rounding does: `quantization: {{algorithm: gptq}}`{texts}")
    names = choices(recipe)
    if _EIGHT in names and recipe.quantization.scheme in names:
        where = "" if recipe.calibration else " --calibration SET"
        bits = min(scheme(name).bits_per_weight for name in names) + _MORE
        lines += [
            f"`quantmint search {recipe.name}{where}` measures the KL with one group of layers at a time in {_EIGHT}, "
            "and prints the overrides to paste",
            "or leave the choice to a run: "
            f"`quantization: {{scheme: {AUTO}, from: [{', '.join(names)}], bits: {bits:g}}}`{texts}",
        ]
    return Advice(tuple(lines))


def _more_bits(groups: Sequence[Group], point: Point) -> list[str]:
    """The groups that cost most as they were chosen, and what the next step up would cost in bits."""
    worst = costliest(groups, point.schemes)
    told = [f"{name} in {scheme} ({share:.0%})" for name, scheme, share in worst]
    lines = [f"of the cost that was predicted, {point.cost:.3g} nats, most is that of {', '.join(told)}"]
    above = [each for each in frontier(groups) if each.cost < point.cost]
    if above:
        step = next((each for each in above if each.cost <= point.cost / 2), above[-1])
        saved = 1 - step.cost / point.cost
        more = f"{step.bits - point.bits:.2f} bits a weight more are predicted to save {saved:.0%} of it"
        bits, speedup = math.ceil(step.bits * 100) / 100, math.floor((step.speedup or 0) * 100) / 100
        lines.append(f"{more}: `bits: {bits:.2f}`" if step.speedup is None else f"{more}: `speedup: {speedup:.2f}`")
    return lines


def in_eight(quantization: Quantization, groups: Sequence[Group]) -> Advice:
    """The predicted KL with one group at a time in 8 bit, and the overrides that take half of it away, or the most."""
    left: list[Group] = []
    for group in groups:
        options = {option.scheme: option for option in group.options}
        now, kept = options.get(assigned(quantization, group.modules[0]) or ""), options.get(_EIGHT)
        if now is not None:
            better = kept is not None and kept.bits > now.bits and kept.cost < now.cost
            left.append(replace(group, options=(now, kept) if kept is not None and better else (now,)))
    gains = sorted((group for group in left if len(group.options) > 1), key=lambda each: -_saved(each))
    if not gains:
        return Advice()
    points, weights = frontier(left), sum(group.weights for group in left)
    least, half = points[0], points[0].cost / 2
    then = next((point for point in points if point.cost <= half), points[-1])
    default, made = overrides(left, then.schemes)
    # Written overrides of what was not measured stay; all others are said anew.
    other = [
        each.model_dump(mode="json")
        for each in quantization.overrides
        if not any(matches(pattern, group.modules[0]) for pattern in each.modules for group in left)
    ]
    data = quantization.model_dump(mode="json") | {"scheme": default, "overrides": [*made, *other]}
    lines = [
        f"predicted KL {least.cost:.3g} nats, which says where more than how much; "
        f"with one group of layers in {_EIGHT}:"
    ]
    lines += [
        f"  {least.cost - _saved(group):.3g} with {group.name}, "
        f"{(group.options[1].bits - group.options[0].bits) / weights:.2f} bits a weight more"
        for group in gains[:_ROWS]
    ]
    count = sum(then.schemes[group.name] == _EIGHT for group in gains)
    lines.append(
        f"{then.cost:.3g} with {count} of {len(gains)} so, {then.bits:.2f} bits a weight for {least.bits:.2f}: "
        "scheme and overrides for the recipe"
    )
    return Advice(tuple(lines), choice_yaml(Quantization.model_validate(data)))


def _saved(group: Group) -> float:
    return group.options[0].cost - group.options[1].cost
