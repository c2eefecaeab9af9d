"""Advise after a FAIL: which layers cost most in few bits, a block to paste, how to ask the tasks all the same.

The cost of layers is only known where it was measured, by `scheme: auto` or `quantmint search`: the errors of weights,
which every run records, order layers no better than chance (docs/notes/precision.md). Else the advice names the command
that measures. The block stands in a recipe as it is, in the place of its sections of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantmint.calibration.sets import load_set
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.base.hardware import hardware, refusal
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.budget import Group, Point, costliest, frontier, overrides
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.recipe.load import LoadedRecipe, choice_yaml, sections_yaml, validated
from quantmint.pipeline.recipe.modules import assigned, matches, text_config
from quantmint.pipeline.recipe.quantization import AUTO, BUDGET, Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.stages.by_library import calibrated
from quantmint.pipeline.stages.calibrate import token_fault
from quantmint.pipeline.stages.checks import accuracy_faults, check
from quantmint.pipeline.stages.sensitivity import spendable
from quantmint.pipeline.stages.setting import Setting

FROM = ("mxfp4", "mxfp4_fp8", "ptpc_fp8")
"""What is chosen from where nothing else is said."""
_EIGHT = "ptpc_fp8"
_ROWS = 5
_MORE = 0.75
"""Bits a weight above the fewest that a first budget has: where most of what four bits lose is won back."""
_TRIES = (6, 5, 4, 3, 2)
"""Of a search that is proposed, the most that the suite can test."""
_HUB_SET, _HUB_LENGTH = "ultrachat", 2048
"""Texts of a recipe that has none, and the tokens of a sample of them."""
_LENGTH, _MOST_SAMPLES = 512, 128
"""Tokens of a sample of a recipe's own texts, and the most samples."""
_SIXTEEN = "16 bit"
_WIDEST = r"re:.*\.down_proj$"


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice after a verdict: ``lines`` of prose, and YAML to ``paste`` into the recipe (may be empty)."""

    lines: tuple[str, ...] = ()
    paste: str = ""


def advise(
    setting: Setting,
    groups: Sequence[Group] | None = None,
    *,
    verdict: Verdict | None = Verdict.FAIL,
    stopped: str | None = None,
) -> Advice:
    """Return the advice on a verdict: what to change in the recipe so that less accuracy is lost.

    ``groups`` are the measured costs, None where nothing was measured; ``stopped`` is the key of the stage that stopped
    the run. The advice is empty unless the verdict is FAIL or a stage stopped the run.
    """
    if verdict is not Verdict.FAIL and stopped is None:
        return Advice()
    advice = _precision(setting, groups)
    if verdict is Verdict.FAIL and stopped is not None:
        lines = (*advice.lines, "no task was asked; to ask them all the same, `gate: {canary: null}`")
        return replace(advice, lines=lines)
    return advice


def choices(recipe: Recipe) -> tuple[str, ...]:
    """Return the schemes that `scheme: auto` could choose from for this recipe and target.

    They are the recipe's own and those of `FROM` that the stream engine makes in the recipe's format and the target
    serves.
    """
    quantization, target = recipe.quantization, recipe.target.hardware
    served = recipe.evaluation.runtime != "reference" or hardware(target).kind != "cpu"
    return tuple(
        name
        for name in dict.fromkeys([*sorted(quantization.schemes), *FROM])
        if "stream" in scheme(name).engines
        and scheme(name).refusal(quantization.engine, quantization.format) is None
        and quantization.format in scheme(name).formats
        and not (served and refusal(target, name, quantization.kv_cache, quantization.format))
    )


def _precision(setting: Setting, groups: Sequence[Group] | None) -> Advice:
    quantization = setting.recipe.quantization
    point = None if setting.chosen is None else setting.chosen.point
    if groups is not None and point is not None:
        affordable = spendable(setting, tuple(groups))
        lines, budget = _more_bits(affordable, point)
        if budget is None:
            return advise_sixteen_bits(
                setting.loaded, affordable, point.schemes, lines, searched=setting.written.search is not None
            )
        return Advice(tuple(lines), _block(setting, {**_choosing(_written(setting)), **budget}))
    eight = all(scheme(name).bits_per_weight >= scheme(_EIGHT).bits_per_weight for name in quantization.schemes)
    if groups is not None:
        if not eight:
            return advise_eight_bits(quantization, groups)
        schemes = {group.name: assigned(quantization, group.modules[0]) or quantization.scheme for group in groups}
        return advise_sixteen_bits(setting.loaded, groups, schemes)
    return _of_eight_bits(setting) if eight else _of_few_bits(setting)


def _of_few_bits(setting: Setting) -> Advice:
    """Return the advice for schemes below 8 bits without measured costs: GPTQ, a search, a choice by layer."""
    recipe, quantization = setting.recipe, setting.recipe.quantization
    lines: list[str] = []
    by_gptq = _takes_gptq(quantization, quantization.schemes)
    if quantization.algorithm == "none" and by_gptq:
        lines.append("at the same bits GPTQ loses less than rounding does: `quantization: {algorithm: gptq}`")
    names = choices(recipe)
    if _EIGHT not in names or quantization.scheme not in names:
        return Advice(tuple(lines), _block(setting, {**_same(_written(setting)), "algorithm": "gptq"}) if lines else "")
    where = "" if recipe.calibration else " --calibration SET"
    bits = min(scheme(name).bits_per_weight for name in names) + _MORE
    lines += [
        f"`quantmint search {recipe.name}{where}` measures the KL with one group of layers at a time in {_EIGHT}, "
        "and prints the overrides to paste",
        "or leave the choice to a run, which goes on to more bits until the gate passes: paste this into the recipe, "
        "in the place of its sections of these names",
    ]
    return Advice(tuple(lines), _block(setting, {**_choosing(_written(setting), names), "bits": bits}))


def _of_eight_bits(setting: Setting) -> Advice:
    """Return the advice where every scheme has 8 bits: `ptpc_fp8`, a 16-bit KV cache, or `down_proj` in 16 bit."""
    quantization, changes = setting.recipe.quantization, dict[str, Any]()
    if quantization.scheme == "fp8" and scheme(_EIGHT).refusal(quantization.engine, quantization.format) is None:
        changes["scheme"] = _EIGHT
    if quantization.kv_cache != "auto":
        changes["kv_cache"] = "auto"
    if changes:
        line = "scales by channel and token, and a KV cache in 16 bit, lose less than this: paste it into the recipe"
    else:
        changes["exclude"] = [*quantization.exclude, _WIDEST]
        line = "the last product of an MLP, whose inputs vary most, may stay in 16 bit: paste this into the recipe"
    return Advice((line,), _block(setting, {**_same(_written(setting)), **changes}, search=False))


def _written(setting: Setting) -> LoadedRecipe:
    """Return the recipe as it was written, before its schemes were chosen."""
    return setting.loaded if setting.chosen is None else setting.chosen.written


def _same(written: LoadedRecipe) -> dict[str, Any]:
    """Return the quantization section to paste: the scheme, and fields that are written or no defaults.

    Written defaults are kept, because they may override a recipe that this one extends.
    """
    quantization = written.recipe.quantization
    section = quantization.model_dump(mode="json", by_alias=True, exclude_none=True)
    changed = quantization.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    stated = written.positions.data.get("quantization", {})
    return {name: value for name, value in section.items() if name in changed or name in stated or name == "scheme"}


def _choosing(written: LoadedRecipe, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the quantization section with `scheme: auto` and without a budget, choosing from ``names``.

    Without ``names`` it keeps the recipe's own `from` and overrides. GPTQ is added where it supports all of the
    schemes.
    """
    quantization, section = written.recipe.quantization, _same(written)
    choices_ = list(names or quantization.from_ or ())
    unchanged = {name: value for name, value in section.items() if name not in (*BUDGET, "overrides", "from")}
    if "overrides" in section:
        unchanged["overrides"] = section["overrides"] if names is None else []
    if quantization.algorithm == "none" and _takes_gptq(quantization, choices_):
        unchanged["algorithm"] = "gptq"
    return {**unchanged, "scheme": AUTO, "from": choices_}


def _takes_gptq(quantization: Quantization, names: Collection[str]) -> bool:
    return all(algorithm("gptq").refusal(quantization.engine, name) is None for name in names)


def _block(setting: Setting, section: Mapping[str, Any], *, search: bool = True) -> str:
    """Return YAML to paste: the quantization ``section``, calibration texts if needed, and with ``search`` a search.

    The search has as many tries as the suite can test its margins with. Empty where the recipe would be refused with
    it.
    """
    recipe = setting.recipe
    sections: dict[str, Any] = {"quantization": dict(section)}
    needs_texts = section["scheme"] == AUTO or section.get("algorithm", "none") != "none"
    if needs_texts and recipe.calibration is None:
        sections["calibration"] = _texts(setting)
    if text := _with_search(setting, sections, search=search and section["scheme"] == AUTO):
        return text
    if section["scheme"] != AUTO or section.get("algorithm") != "gptq":
        return ""
    # GPTQ needs more texts than sensitivities: without it the choice may still be measured on those that there are.
    plain = {name: value for name, value in section.items() if name != "algorithm"}
    return _with_search(setting, {**sections, "quantization": plain}, search=search)


def _with_search(setting: Setting, sections: Mapping[str, Any], *, search: bool) -> str:
    """Return sections as YAML, if ``search`` with the most tries that are accepted; empty where all are refused."""
    for tries in _TRIES if search else ():
        if text := _accepted(setting, {**sections, "search": {"tries": tries}}):
            return text
    return _accepted(setting, sections) or ""


def _accepted(setting: Setting, sections: Mapping[str, Any]) -> str | None:
    """Return sections as YAML; None where the recipe would be refused with them, or its texts have too few tokens."""
    written = _written(setting)
    data = written.recipe.model_dump(mode="json", by_alias=True) | dict(sections)
    try:
        loaded = validated(replace(written.positions, data=data), written.path)
    except RecipeError:
        return None
    loaded = replace(loaded, source_folder=written.source_folder)
    if check(loaded, config=setting.config) or list(accuracy_faults(loaded, setting.suite)):
        return None
    quantization = loaded.recipe.quantization
    reads = quantization.scheme == AUTO or calibrated(quantization)
    return None if reads and token_fault(loaded, setting.source.folder) is not None else sections_yaml(sections)


def _texts(setting: Setting) -> dict[str, Any]:
    """Return a calibration section for a recipe without one: the texts that `init` wrote beside it, else ultrachat.

    The sequence length is at most the model's max_position_embeddings.
    """
    longest = text_config(setting.config).get("max_position_embeddings")
    limit = longest if isinstance(longest, int) else _HUB_LENGTH
    written = _written(setting)
    name = setting.recipe.name
    texts_file = written.path.parent / f"{name}-eval" / f"{name}-texts.yaml"
    if not texts_file.is_file():
        return {"set": _HUB_SET, **({"sequence_length": limit} if limit < _HUB_LENGTH else {})}
    file = load_set(str(texts_file)).file
    words = 0 if file is None else len(file.read_text(encoding="utf-8", errors="replace").split())
    length = min(_LENGTH, limit)
    samples = min(_MOST_SAMPLES, max(1, words // length))  # a word has a token or more
    return {"set": f"{name}-eval/{name}-texts.yaml", "samples": samples, "sequence_length": length}


def _more_bits(groups: Sequence[Group], point: Point) -> tuple[list[str], dict[str, float] | None]:
    """Return lines on the costliest groups, and the budget that at least halves the cost, or the largest one.

    The budget is in ``bits`` or ``speedup``; None where no affordable choice costs less than ``point``.
    """
    lines = [_costliest(groups, point.schemes, point.cost)]
    above = [candidate for candidate in frontier(groups) if candidate.cost < point.cost]
    if not above:
        return lines, None
    step = next((candidate for candidate in above if candidate.cost <= point.cost / 2), above[-1])
    saved = 1 - step.cost / point.cost
    gain = f"{step.bits - point.bits:.2f} bits a weight more are predicted to save {saved:.0%} of it"
    bits, speedup = math.ceil(step.bits * 100) / 100, math.floor((step.speedup or 0) * 100) / 100
    budget: dict[str, Any] = {"bits": bits} if step.speedup is None else {"objective": "throughput", "speedup": speedup}
    lines.append(f"{gain}: `bits: {bits:.2f}`" if step.speedup is None else f"{gain}: `speedup: {speedup:.2f}`")
    return lines, budget


def _costliest(groups: Sequence[Group], schemes: Mapping[str, str], cost: float) -> str:
    parts = [f"{name} in {scheme} ({share:.0%})" for name, scheme, share in costliest(groups, schemes)]
    return f"of the cost that was predicted, {cost:.3g} nats, most is that of {', '.join(parts)}"


def advise_sixteen_bits(
    loaded: LoadedRecipe,
    groups: Sequence[Group],
    schemes: Mapping[str, str],
    lines: Sequence[str] = (),
    *,
    searched: bool = False,
) -> Advice:
    """Return the advice to leave those groups in 16 bit that make up half of the predicted cost.

    ``schemes`` names the present scheme of each group; ``lines`` stand in place of the line on the costliest groups.
    With ``searched`` the block also removes the recipe's search, which needs schemes that are still to be chosen.
    """
    costs = {
        group.name: option.cost for group in groups for option in group.options if option.scheme == schemes[group.name]
    }
    in_16_bit = _half_of_cost(costs)
    patterns = _patterns_in_sixteen_bits([group for group in groups if group.name in costs], in_16_bit)
    if not patterns:
        return Advice(tuple(lines))
    weights = {group.name: group.weights for group in groups}
    share = sum(weights[name] for name in in_16_bit) / sum(weights.values())
    conclusion = (
        f"{len(in_16_bit)} of {len(costs)} groups make half of the predicted cost; with these, {share:.0%} of the "
        "weights, in 16 bit it is halved: paste this into the recipe"
    )
    section = {**_same(loaded), "exclude": [*loaded.recipe.quantization.exclude, *patterns]}
    sections = {"quantization": section, **({"search": None} if searched else {})}
    first = list(lines) or [_costliest(groups, schemes, sum(costs.values()))]
    return Advice((*first, conclusion), sections_yaml(sections))


def _half_of_cost(costs: Mapping[str, float]) -> list[str]:
    """Return the fewest groups that make up half of the total cost, costliest first."""
    half, names = sum(costs.values()) / 2, list[str]()
    for name in sorted(costs, key=lambda group: -costs[group]):
        if sum(costs[group] for group in names) >= half:
            break
        names.append(name)
    return names


def _patterns_in_sixteen_bits(groups: Sequence[Group], names: Collection[str]) -> list[str]:
    """Return module patterns that keep the groups in ``names`` in 16 bit.

    Empty without names, and where they are most of all groups, so that 16 bit would be the recipe's default scheme.
    """
    if not names:
        return []
    schemes = {group.name: _SIXTEEN if group.name in names else _EIGHT for group in groups}
    _, all_overrides = overrides(groups, schemes)
    return [pattern for override in all_overrides if override["scheme"] == _SIXTEEN for pattern in override["modules"]]


def advise_eight_bits(quantization: Quantization, groups: Sequence[Group]) -> Advice:
    """Return the predicted KL with one group at a time in 8 bit, and a block of overrides that halves it.

    Where even all groups in 8 bit do not halve it, the block has all of them. Empty where 8 bit improves no group.
    """
    choices_by_group = _present_and_eight_bits(quantization, groups)
    improvable = sorted(
        (group for group in choices_by_group if len(group.options) > 1), key=lambda group: -_saved(group)
    )
    if not improvable:
        return Advice()
    points, weights = frontier(choices_by_group), sum(group.weights for group in choices_by_group)
    present = points[0]
    target = next((point for point in points if point.cost <= present.cost / 2), points[-1])
    count = sum(target.schemes[group.name] == _EIGHT for group in improvable)
    lines = [
        f"predicted KL {present.cost:.3g} nats, which says where more than how much; "
        f"with one group of layers in {_EIGHT}:",
        *(
            f"  {present.cost - _saved(group):.3g} with {group.name}, "
            f"{(group.options[1].bits - group.options[0].bits) / weights:.2f} bits a weight more"
            for group in improvable[:_ROWS]
        ),
        f"{target.cost:.3g} with {count} of {len(improvable)} so, {target.bits:.2f} bits a weight for "
        f"{present.bits:.2f}: scheme and overrides for the recipe",
    ]
    return Advice(tuple(lines), choice_yaml(_with_choice(quantization, choices_by_group, target)))


def _present_and_eight_bits(quantization: Quantization, groups: Sequence[Group]) -> list[Group]:
    """Return groups with their present option first, and second the one in 8 bit where it has more bits and costs less.

    Groups whose present scheme was not measured are left out.
    """
    reduced: list[Group] = []
    for group in groups:
        options = {option.scheme: option for option in group.options}
        present = options.get(assigned(quantization, group.modules[0]) or "")
        in_8_bit = options.get(_EIGHT)
        if present is None:
            continue
        better = in_8_bit is not None and in_8_bit.bits > present.bits and in_8_bit.cost < present.cost
        reduced.append(replace(group, options=(present, in_8_bit) if in_8_bit is not None and better else (present,)))
    return reduced


def _with_choice(quantization: Quantization, groups: Sequence[Group], point: Point) -> Quantization:
    """Return the quantization with the schemes of ``point``; overrides that match none of the ``groups`` stay."""
    default, new_overrides = overrides(groups, point.schemes)
    unmeasured = [
        override.model_dump(mode="json")
        for override in quantization.overrides
        if not any(matches(pattern, group.modules[0]) for pattern in override.modules for group in groups)
    ]
    changes = {"scheme": default, "overrides": [*new_overrides, *unmeasured]}
    return Quantization.model_validate(quantization.model_dump(mode="json") | changes)


def _saved(group: Group) -> float:
    """Return the cost saved by the second option of a group over its first, in nats."""
    return group.options[0].cost - group.options[1].cost
