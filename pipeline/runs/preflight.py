"""Refuse a run before it starts where it could not come to its end: packages, vLLM, device, disk, signer, permissions.

Sizes are exact where the layout decides (the checkpoint), an upper bound where the machine does (calibration, serving).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.addresses import published_folder
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.runs.planner import foreseen, missing_stages
from quantmint.pipeline.stages.by_library import calibrated
from quantmint.pipeline.stages.calibrate import token_fault
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction, model_for, predict
from quantmint.pipeline.stages.source import config_folder
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.disk import free_bytes

_OVERHEAD = 64 << 20  # bytes beside the weights: tokenizer, logs, samples, report


def disk_needed(
    prediction: Prediction, missing: Collection[str], setting: Setting, plan: Sequence[Planned]
) -> dict[str, int]:
    """Return the bytes that the ``missing`` stages will write to the store's disk, by purpose.

    What earlier attempts wrote is subtracted; logs and samples are added. Empty where no stage writes much.
    """
    needed: dict[str, int] = {}
    for planned in plan:
        if planned.key in missing:
            begun = setting.store.begun(planned.family, planned.fingerprint)
            needed |= planned.stage.disk(setting, prediction, begun)
    return {**needed, "logs and samples": _OVERHEAD} if needed else {}


def require_disk(needed: Mapping[str, int], free: int, where: str) -> None:
    """Raise `UserError` where ``needed`` bytes, by purpose, exceed the ``free`` bytes of the disk ``where``."""
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size(count)}" for name, count in needed.items())
        raise UserError(
            f"{where}: {size(total)} are needed ({parts}), {size(free)} are free.",
            hint="Free space, or write to another disk; `quantmint gc` removes from a store what no recent run uses.",
        )


def require_room_to_publish(setting: Setting, prediction: Prediction, missing: Collection[str]) -> None:
    """Raise `UserError` where `publish` would run and the publish folder's disk is too small for the checkpoint."""
    folder = published_folder(setting.recipe, setting.home)
    if folder is not None and "publish" in missing:
        require_disk({"published copy": prediction.checkpoint}, free_bytes(folder), f"publish.folder: {folder}")


def require_tokens(setting: Setting, missing: Collection[str]) -> None:
    """Raise `RecipeError` where a missing stage reads calibration texts that have too few tokens for the samples.

    Only small local files are counted, with the tokenizer of a local source.
    """
    read = ("quantize" in missing and calibrated(setting.recipe.quantization)) or "sensitivity" in missing
    if read and (fault := token_fault(setting.loaded, setting.source.folder)) is not None:
        refuse([fault])


def require_means(
    plan: Sequence[Planned], setting: Setting, redo: Collection[str] = (), *, prediction: Prediction | None = None
) -> None:
    """Raise `UserError` where a run could not succeed: packages, checks of its stages, calibration texts, disk space.

    ``redo`` names stages to make again; ``prediction`` are the checkpoint's sizes, if known already. Packages are
    looked for too, so that a run does not fail after hours because the report's plotting library is missing.
    """
    plan = foreseen(plan, setting, redo)
    missing = missing_stages(plan, setting, redo)
    require_tokens(setting, missing)
    stages = [planned.stage for planned in plan if planned.key in missing]
    for extra, name in dict.fromkeys(module for stage in stages for module in stage.imports(setting)):
        if find_spec(name) is None:
            raise UserError(f"this needs {name}, which is not installed.", hint=f"pip install 'quantmint[{extra}]'")
    for check in dict.fromkeys(check for stage in reversed(stages) for check in stage.checks(setting)):
        check(setting)  # the right to publish first: it is asked quickly
    if "quantize" in missing:
        prediction = prediction or predict(*model_for(setting, config_folder(setting.source)), setting.recipe)
        where = setting.store.root.absolute()
        require_disk(disk_needed(prediction, missing, setting, plan), free_bytes(where), str(where))
        require_room_to_publish(setting, prediction, missing)
