"""How long a run takes from its first stage to its last: as it took before, else as it is reckoned.

What was seen counts before what is reckoned: a recipe's newest run says how long each stage took here, and a baseline's
stage how long its candidate's takes. Answers are scaled by the items that are asked, weights only count where the stage
is the same. A first run is reckoned by rates of such machines and by what items of such tasks are long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.stages.estimate import Estimate, control_items, planned_items
from quantmint.pipeline.stages.evaluate import EvaluateStage
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.gc import list_runs

_TELLING: Final = 0.5
"""Share of the answers that an evaluation must have asked for, and not known, for its time to tell of another."""
_FEW: Final = 400
"""Items of which half would show little."""


def ahead(
    plan: Sequence[Planned],
    missing: Collection[str],
    setting: Setting,
    guesses: Mapping[str, float],
    *,
    here: bool = True,
) -> Mapping[str, tuple[float, str]]:
    """Return seconds of a plan's stages: 0 where one is "cached", as in an earlier run ("seen"), or "reckoned".

    ``guesses`` are the seconds that `reckoned` says, by stage. What a library takes to quantize is not known before it
    was seen: its stage is left out, and the sum is a lower bound. Earlier runs of this store tell nothing of another
    machine: they count where the plan is for this one (``here``).
    """
    seen = _seen(setting) if here else {}
    found: dict[str, tuple[float, str]] = {}
    for planned in plan:
        if planned.key not in missing:
            found[planned.key] = 0.0, "cached"
        elif (took := _as_before(planned, setting, seen)) is not None:
            found[planned.key] = took, "seen"
        elif planned.key in guesses:
            found[planned.key] = guesses[planned.key], "reckoned"
    return found


def further_tries(
    setting: Setting, plan: Sequence[Planned], took: Mapping[str, float], verdicts: Sequence[Verdict | None]
) -> tuple[int, float]:
    """Return how many tries a search may make after the next one, and the seconds that all of them take at most.

    ``took`` are the seconds of the stages of ``plan``, ``verdicts`` those of the tries that were planned so far. Each
    try runs again what depends on the checkpoint and releases nothing.
    """
    search = setting.written.search
    if search is None:
        return 0, 0.0
    left = max(search.tries - 1 - sum(verdict is not None for verdict in verdicts), 0)
    repeated: list[str] = []
    for planned in plan:
        depends = planned.key == "quantize" or not set(repeated).isdisjoint(planned.inputs.values())
        if depends and not planned.stage.releases:
            repeated.append(planned.key)
    return left, left * sum(took.get(key, 0.0) for key in repeated)


def _seen(setting: Setting) -> Mapping[str, tuple[str, float]]:
    """By stage the fingerprint and the seconds of the recipe's newest run that made it."""
    found: dict[str, tuple[str, float]] = {}
    for run in list_runs(setting.store.root):
        stages: Any = run.facts.get("stages", {}) if run.recipe == setting.recipe.name else {}
        for key, facts in stages.items():
            if not facts["cached"]:
                found.setdefault(key, (facts["fingerprint"], facts["seconds"]))
    return found


def _as_before(planned: Planned, setting: Setting, seen: Mapping[str, tuple[str, float]]) -> float | None:
    other = planned.key.replace("candidate", "baseline")
    print_, seconds = seen.get(planned.key) or seen.get(other) or ("", 0.0)
    if not print_ or (planned.stage.by_content and print_ != planned.fingerprint):
        return None
    if isinstance(planned.stage, EvaluateStage):
        entry = setting.store.find(planned.family, print_)
        result: Any = {"items": {}} if entry is None else entry.record.result
        planned_before = sum(items for _, items in result["items"].values())
        answered = sum(answered for answered, _ in result["items"].values())
        share = sum(result["asked"].values()) / max(answered, 1) if "asked" in result else 1.0
        if share < _TELLING:  # most answers were known: the time tells nothing
            return None
        if planned_before:  # a candidate is taken to be asked the same share of what is planned
            return float(seconds / share * sum(planned_items(setting).values()) / planned_before)
    return seconds


def reckoned(plan: Sequence[Planned], estimate: Estimate) -> Mapping[str, float]:
    """Return the forecasts of the stages of a plan on a machine, in seconds, as far as there are any."""
    forecasts = {planned.key: planned.stage.seconds(estimate) for planned in plan}
    return {key: seconds for key, seconds in forecasts.items() if seconds is not None}


def savings(took: Mapping[str, float], setting: Setting) -> Sequence[tuple[str, float]]:
    """What would save most of a run, as a setting and its seconds; nothing that saves less than a tenth of it."""
    items, again = planned_items(setting), control_items(setting)
    most = max(items.values(), default=0)
    asking = sum(took.get(key, 0.0) for key in ("evaluate-baseline", "evaluate-candidate"))
    half = sum(min(count, most // 2) for count in items.values()) / max(1, sum(items.values()))
    fewer = sum(min(count, 100) for count in again.values()) / max(1, sum(again.values()))
    offers = [
        (f"evaluation.limit: {most // 2}", asking * (1 - half) if most >= _FEW else 0.0),
        ("evaluation.control: 100", took.get("control", 0.0) * (1 - fewer)),
        ("gate.throughput.min_ratio: null", took.get("bench", 0.0)),
    ]
    total = sum(took.values())
    return sorted((one for one in offers if one[1] > 0.1 * total), key=lambda one: -one[1])
