"""What a run measures of a recipe's two sides: the inputs of the stages that look at all of it, gate and report."""

from __future__ import annotations

from pipeline.stage import Setting

ORDER = ("baseline", "candidate")


def asks_twice(setting: Setting) -> bool:
    """Whether the baseline answers some items a second time."""
    return setting.recipe.evaluation.control is not None


def has_throughput(setting: Setting) -> bool:
    """Whether what answers is the server whose speed matters."""
    return setting.recipe.evaluation.runtime == "vllm"


def measured_inputs(setting: Setting, *, stopped: bool = False) -> dict[str, str]:
    """Keys of the stages that measure, by themselves; ``stopped``: of a run that ended with the canary."""
    keys = [f"{kind}-{side}" for side in ORDER for kind in ("serve", "canary")]
    if not stopped:
        keys += [f"evaluate-{side}" for side in ORDER]
        keys += ["control"] if asks_twice(setting) else []
        keys += ["bench"] if has_throughput(setting) else []
    return dict(zip(keys, keys, strict=True))
