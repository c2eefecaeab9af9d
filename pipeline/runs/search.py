"""Choose the schemes of `scheme: auto`: from measured sensitivities to a recipe with plain overrides, and more bits
after a FAIL.

A recipe with a choice to be made is run in two parts. The first measures what each group of modules costs in each
scheme; the choice follows from that. The second is the run of a recipe that states the choice as overrides, and is
planned, made, judged and published like any other. With a `search`, a FAIL leads to the next such recipe, with more
bits, and a PASS after it to one with fewer, until the fewest bits that pass are known to a quarter bit; that checkpoint
is published. Stages that the tries share, the baseline's measurements above all, are taken from the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.base.schemes import scheme, table
from quantmint.pipeline.quantize.budget import Group, Point, next_try, overrides
from quantmint.pipeline.recipe.load import LoadedRecipe, validated
from quantmint.pipeline.recipe.modules import override_of
from quantmint.pipeline.recipe.quantization import AUTO, BUDGET
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs.planner import build_plan, cut, find_entry, foreseen
from quantmint.pipeline.runs.preflight import require_means
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.stages.advice import choices
from quantmint.pipeline.stages.sensitivity import KEY, priced, read_groups, spendable
from quantmint.pipeline.stages.setting import Chosen, Setting

REPORT = "report"
_GO_ON = (Verdict.FAIL, Verdict.INCONCLUSIVE)
"""What more bits may mend: a loss that is too large, or so near the margin that the items cannot tell."""


def chosen(written: LoadedRecipe, groups: tuple[Group, ...], point: Point) -> LoadedRecipe:
    """Return the recipe with the schemes of ``point`` in the place of `scheme: auto`, as a default and overrides.

    ``groups`` are those whose costs were measured, ``point`` says the scheme of each. The search section goes, and
    the gate's confidence becomes that of one of its tries.
    """
    quantization = written.recipe.quantization
    free = [group for group in priced(quantization, groups) if override_of(quantization, group.modules[0]) is None]
    default, patterns = overrides(free, point.schemes)
    return _with(written, default, patterns)


def _with(written: LoadedRecipe, default: str, patterns: list[dict[str, Any]]) -> LoadedRecipe:
    data = written.recipe.model_dump(mode="json")
    section = {name: value for name, value in data["quantization"].items() if name not in ("from", *BUDGET)}
    data["quantization"] = {**section, "scheme": default, "overrides": [*section["overrides"], *patterns]}
    data["gate"]["accuracy"]["confidence"] = round(written.recipe.confidence, 6)
    data.pop("search", None)
    recipe = Recipe.model_validate(data)
    return replace(written, recipe=recipe)


def stand_in(setting: Setting) -> Setting:
    """Return the setting with all modules in the largest scheme if no choice is known, for forecasts and checks."""
    if setting.recipe.quantization.scheme != AUTO:
        return setting
    largest = max(setting.recipe.quantization.from_ or (), key=lambda name: scheme(name).bits_per_weight)
    return replace(setting, loaded=_with(setting.loaded, largest, []), chosen=Chosen(setting.loaded, None))


def as_written(setting: Setting) -> Setting:
    """Return the setting with its recipe as it was written, without the choice."""
    return setting if setting.chosen is None else replace(setting, loaded=setting.chosen.written, chosen=None)


def settled(setting: Setting) -> Setting:
    """Return the setting with the choice that a run would follow, by what the store knows (see `tried`).

    In an unfinished search that is the next try. Of a finished search it is the choice with the fewest bits that
    passed, else the last one. Without measured costs, and without a choice, the setting is returned as it is.
    """
    tries = list(tried(setting))
    if not tries:
        return setting
    passed = [try_ for try_, verdict in tries if verdict is Verdict.PASS]
    if tries[-1][1] is None or not passed:
        return tries[-1][0]
    return min(passed, key=lambda try_: _point_of(try_).bits)


def _point_of(try_: Setting) -> Point:
    assert try_.chosen is not None  # noqa: S101 - it is a try
    assert try_.chosen.point is not None  # noqa: S101
    return try_.chosen.point


def tried(setting: Setting) -> Iterator[tuple[Setting, Verdict | None]]:
    """Yield a search's tries in order, each with its verdict in the store, None for one that is still to be made.

    A recipe that chooses without a search has one try without a verdict; without measured costs there are none. Raises
    `UserError` for a budget that is too small.
    """
    written = as_written(setting)
    groups = _kept_groups(written) if written.recipe.quantization.scheme == AUTO else None
    if groups is None:
        return
    groups_left, quantization = spendable(written, groups), written.recipe.quantization
    budget = quantization.bits or quantization.speedup
    assert budget is not None  # noqa: S101 - the recipe's checks
    count = 1 if written.recipe.search is None else written.recipe.search.tries
    failed: list[Point] = []
    passed: list[Point] = []
    while (point := next_try(groups_left, budget, count, failed, passed)) is not None:
        try_ = replace(written, loaded=chosen(written.loaded, groups, point), chosen=Chosen(written.loaded, point))
        verdict = _verdict(try_)
        yield try_, verdict
        if verdict is None or verdict not in (*_GO_ON, Verdict.PASS):
            return
        (passed if verdict is Verdict.PASS else failed).append(point)


def _verdict(setting: Setting) -> Verdict | None:
    """Return the gate's verdict on a try, also of one that its canary stopped; None without a search or an entry."""
    if setting.written.search is None:
        return None
    plan = foreseen(build_plan(setting), setting)
    entry = find_entry(next(planned for planned in plan if planned.key == "gate"), setting)
    return None if entry is None else Verdict(str(entry.record.result["verdict"]))


def opened(
    loaded: LoadedRecipe,
    names: tuple[str, ...] | None = None,
    bits: float | None = None,
    speedup: float | None = None,
    *,
    calibration: Mapping[str, Any] | None = None,
) -> LoadedRecipe:
    """Return the recipe with `scheme: auto` over ``names`` (None: its own, or `stages.advice.choices`), and no search.

    The budget is in bits, unless ``speedup`` is given, or the recipe has a speedup and ``bits`` is None. The value of
    ``bits`` is not stored: the recipe's own bits count, else the bits of the smallest scheme. ``calibration`` replaces
    the recipe's section. Raises `RecipeError` without schemes to choose from, and for schemes that do not go together.
    """
    data = loaded.recipe.model_dump(mode="json")
    quantization = data["quantization"]
    if quantization["scheme"] != AUTO:
        names = names or choices(loaded.recipe)
        quantization |= {"overrides": [], "scheme": AUTO}
    names = names or tuple(quantization["from"])
    bits_of = [scheme(name).bits_per_weight for name in names if name in table()]
    budgets = {name: quantization.pop(name, None) for name in BUDGET}
    if speedup is not None or (bits is None and budgets["speedup"] is not None):
        budget: dict[str, Any] = {"objective": "throughput", "speedup": speedup or budgets["speedup"]}
    else:
        budget = {"bits": budgets["bits"] or min(bits_of, default=4.25)}
    quantization |= {"from": list(names), **budget}
    data |= {"search": None, "calibration": calibration or data["calibration"]}
    return replace(validated(replace(loaded.positions, data=data), loaded.path), source_folder=loaded.source_folder)


def known_groups(setting: Setting) -> tuple[Group, ...] | None:
    """Return the groups with the costs that the store has; None where they were not measured or cannot be.

    For a recipe without `scheme: auto` they are those that a search for it (`opened`) would measure.
    """
    written = as_written(setting)
    if written.recipe.calibration is None:
        return None
    if written.recipe.quantization.scheme != AUTO:
        try:
            written = replace(written, loaded=opened(written.loaded))
        except RecipeError:  # there is nothing to choose from
            return None
    return _kept_groups(written)


def _kept_groups(written: Setting) -> tuple[Group, ...] | None:
    planned = next((planned for planned in build_plan(written) if planned.key == KEY), None)
    entry = None if planned is None else find_entry(planned, written)
    return None if entry is None else read_groups(entry)


def measured_groups(setting: Setting, reporter: Reporter) -> tuple[Group, ...]:
    """Return the groups with their costs, from the store or measured now; the recipe must have `scheme: auto`."""
    groups = known_groups(measured(setting, reporter))
    assert groups is not None  # noqa: S101 - it was measured
    return groups


def measured(setting: Setting, reporter: Reporter, redo: Collection[str] = ()) -> Setting:
    """Measure the costs for a choice, unless the store has them, and return the setting with the choice.

    ``redo`` may contain `sensitivity`, to measure again. A recipe without a choice is returned as it is.
    """
    chosen_ = settled(setting)
    if chosen_.chosen is not None and KEY not in redo:
        return chosen_
    if setting.recipe.quantization.scheme == AUTO:
        run_plan(build_plan(setting), setting, reporter, redo=[name for name in redo if name == KEY])
    return settled(setting)


def run_search(
    setting: Setting, reporter: Reporter, *, until: str | None = None, redo: Collection[str] = ()
) -> tuple[RunOutcome, Setting, Sequence[Mapping[str, Any]]]:
    """Run a recipe; with a search, run its tries: more bits after a FAIL or INCONCLUSIVE, fewer after a PASS.

    The tries end with their reports, and the one with the fewest bits that passed is published. Returns the last
    outcome, its setting, and all tries. ``until`` is the last stage to run, ``redo`` names stages to make again in the
    first try. Raises `QuantmintError`; finished stages stay, and the same call resumes after them.
    """
    likely = stand_in(setting)
    plan = build_plan(likely, until)
    for name in redo:
        cut(plan, name)
    require_means(plan, likely, redo)
    if plan[-1].key in ("source", KEY):
        return run_plan(plan, likely, reporter, redo=redo), likely, ()
    setting, tries = measured(setting, reporter, redo), list[Mapping[str, Any]]()
    again = [name for name in redo if name != KEY]
    search = setting.written.search if until is None else None
    while True:
        if setting.chosen is not None:
            of_all = "" if search is None else f"try {len(tries) + 1} of at most {search.tries}: "
            reporter.say(f"{of_all}{setting.chosen.line}")
        # What is published is known when the search is over: a try ends with its report.
        plan = build_plan(setting, until)
        if search is not None and any(planned.key == REPORT for planned in plan):
            plan = cut(plan, REPORT)
        outcome = run_plan(plan, setting, reporter, redo=again)
        if setting.chosen is not None:
            tries.append({**setting.chosen.to_json(), "verdict": outcome.verdict and outcome.verdict.value})
        following = settled(setting)
        same = following.recipe == setting.recipe
        if search is None or outcome.verdict is Verdict.INVALID or (same and outcome.verdict is not Verdict.PASS):
            return outcome, setting, tries
        if same or _verdict(following) is not None:
            break
        setting, again = following, []
    reporter.say("the search is over: the fewest bits that passed go on")
    return run_plan(build_plan(following), following, reporter), following, tries
