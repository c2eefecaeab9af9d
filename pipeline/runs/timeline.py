"""Forecast the time of each stage of a run: from an earlier run of the recipe, else from the rates of the machine.

A recipe's newest run says how long each stage took here, and a baseline's stage how long its candidate's takes. Times
of answering are scaled by the number of items; times of stages that work on weights count only where the fingerprint is
the same.
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


def stage_times(
    plan: Sequence[Planned],
    missing: Collection[str],
    setting: Setting,
    forecasts: Mapping[str, float],
    *,
    here: bool = True,
) -> Mapping[str, tuple[float, str]]:
    """Return (seconds, origin) by stage key; the origin is "cached" (0 s), "seen" in an earlier run, or "reckoned".

    ``missing`` are the keys of the stages that would run, ``forecasts`` the result of `stage_forecasts`. A stage
    without any is left out, such as a library's first run, and the sum is then a lower bound. Earlier runs of this
    store count only where the plan is for this machine (``here``).
    """
    earlier = _earlier_seconds(setting) if here else {}
    times: dict[str, tuple[float, str]] = {}
    for planned in plan:
        if planned.key not in missing:
            times[planned.key] = 0.0, "cached"
        elif (before := _seconds_before(planned, setting, earlier)) is not None:
            times[planned.key] = before, "seen"
        elif planned.key in forecasts:
            times[planned.key] = forecasts[planned.key], "reckoned"
    return times


def further_tries(
    setting: Setting, plan: Sequence[Planned], seconds: Mapping[str, float], verdicts: Sequence[Verdict | None]
) -> tuple[int, float]:
    """Return how many tries a search may make after the next one, and the most seconds that all of them take.

    ``seconds`` are those of the stages of ``plan``, ``verdicts`` those of the tries so far, None for one to be made.
    Each try repeats the stages that depend on the checkpoint and release nothing.
    """
    search = setting.written.search
    if search is None:
        return 0, 0.0
    count = max(search.tries - 1 - sum(verdict is not None for verdict in verdicts), 0)
    repeated: list[str] = []
    for planned in plan:
        depends = planned.key == "quantize" or not set(repeated).isdisjoint(planned.inputs.values())
        if depends and not planned.stage.releases:
            repeated.append(planned.key)
    return count, count * sum(seconds.get(key, 0.0) for key in repeated)


def _earlier_seconds(setting: Setting) -> Mapping[str, tuple[str, float]]:
    """Return (fingerprint, seconds) by stage key, of the recipe's newest run that made the stage."""
    earlier: dict[str, tuple[str, float]] = {}
    for run in list_runs(setting.store.root):
        stages: Any = run.facts.get("stages", {}) if run.recipe == setting.recipe.name else {}
        for key, facts in stages.items():
            if not facts["cached"]:
                earlier.setdefault(key, (facts["fingerprint"], facts["seconds"]))
    return earlier


def _seconds_before(planned: Planned, setting: Setting, earlier: Mapping[str, tuple[str, float]]) -> float | None:
    """Return the seconds that an earlier run of the stage or of its baseline suggests; None where none does.

    ``earlier`` is `_earlier_seconds`.
    """
    baseline = planned.key.replace("candidate", "baseline")
    print_, seconds = earlier.get(planned.key) or earlier.get(baseline) or ("", 0.0)
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
    return planned.stage.seconds_again(planned, seconds, setting.store.find(planned.family, print_), setting)


def stage_forecasts(plan: Sequence[Planned], estimate: Estimate) -> Mapping[str, float]:
    """Return the forecast seconds by stage key; stages without a forecast are left out."""
    forecasts = {planned.key: planned.stage.seconds(estimate) for planned in plan}
    return {key: seconds for key, seconds in forecasts.items() if seconds is not None}


def savings(seconds: Mapping[str, float], setting: Setting) -> Sequence[tuple[str, float]]:
    """Return (setting, seconds saved) for settings that save over a tenth of the run, the largest first.

    ``seconds`` are those of the run's stages by key.
    """
    items, again = planned_items(setting), control_items(setting)
    most = max(items.values(), default=0)
    asking = sum(seconds.get(key, 0.0) for key in ("evaluate-baseline", "evaluate-candidate"))
    half = sum(min(count, most // 2) for count in items.values()) / max(1, sum(items.values()))
    fewer = sum(min(count, 100) for count in again.values()) / max(1, sum(again.values()))
    offers = [
        (f"evaluation.limit: {most // 2}", asking * (1 - half) if most >= _FEW else 0.0),
        ("evaluation.control: 100", seconds.get("control", 0.0) * (1 - fewer)),
        ("gate.throughput.min_ratio: null", seconds.get("bench", 0.0)),
    ]
    total = sum(seconds.values())
    return sorted((offer for offer in offers if offer[1] > 0.1 * total), key=lambda offer: -offer[1])
