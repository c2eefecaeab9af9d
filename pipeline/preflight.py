"""What a run can be refused for before it starts.

No vLLM to serve with, no such device, no room for the checkpoint, nobody who could sign, no right to publish.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from eval.verdict import Verdict
from pipeline.device import device_memory, resolve_devices
from pipeline.engines.libraries.size import require_memory as require_library_memory
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint, open_checkpoint
from pipeline.model.structure import Structure, imagine, read_structure
from pipeline.prediction import Prediction, disk_needed, predict, require_disk
from pipeline.publish.admission import require_admission
from pipeline.runner import find_entry, foreseen
from pipeline.stage import Planned, Setting
from pipeline.stages.calibrate import pinned_set
from pipeline.stages.serve import launch_plan
from pipeline.stages.servers import over_nodes
from pipeline.stages.sign import require_signer
from pipeline.stages.source import config_folder
from pipeline.store.disk import free_bytes

_PACKAGES = (
    ("calibrate", ("torch", "transformers"), "quantize"),
    ("quantize", ("torch", "transformers"), "quantize"),
    ("canary", ("transformers",), "evaluate"),
    ("evaluate", ("lm_eval",), "evaluate"),
    ("control", ("lm_eval",), "evaluate"),
    ("report", ("jinja2", "matplotlib"), "report"),
    ("package", ("jinja2", "detect_secrets", "cyclonedx"), "publish"),
    ("sign", ("model_signing", "OpenSSL", "sigstore"), "publish"),
)
_SERVED = ("serve", "canary", "evaluate", "control", "bench")  # what asks a server


def missing_stages(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> list[str]:
    """Keys of the stages that would run: what the remote tier offers is taken from there."""

    def is_there(planned: Planned) -> bool:
        if planned.key in redo or planned.stage.family in redo:
            return False
        if find_entry(planned, setting) is not None:
            return True
        return setting.remote is not None and setting.remote.offers(planned.stage.family, planned.fingerprint)

    return [planned.key for planned in plan if not is_there(planned)]


def known_unsound(plan: Sequence[Planned], setting: Setting, redo: Collection[str] = ()) -> bool:
    """Whether inspection has condemned the checkpoint before."""
    inspect = next((planned for planned in plan if planned.key == "inspect"), None)
    if inspect is None or {"inspect", "quantize"} & set(redo):
        return False
    entry = find_entry(inspect, setting)
    return entry is not None and entry.record.result["verdict"] != Verdict.PASS.value


def require_means(
    plan: Sequence[Planned], setting: Setting, redo: Collection[str] = (), *, prediction: Prediction | None = None
) -> None:
    """Raise `UserError` where a run could not come to its end; ``prediction`` is what was predicted already."""
    plan = foreseen(plan, setting, redo)
    missing = missing_stages(plan, setting, redo)
    if known_unsound(plan, setting, redo):
        return  # the run ends there, and says why
    _require_packages(missing)
    if "sign" in missing:
        require_signer(setting)
    if "publish" in missing:
        require_admission(setting)
    if "calibrate" in missing and setting.recipe.calibration is not None:
        pinned_set(setting.recipe.calibration)
    if any(key.startswith(_SERVED) for key in missing):
        _require_server(setting)
    if "quantize" in missing:
        prediction = prediction or predict_for(setting, config_folder(setting.source))
        where = setting.store.root.absolute()
        download = setting.source.folder is None
        copied = setting.recipe.publish.folder is not None
        needed = disk_needed(prediction, missing, download=download, copied=copied)
        require_disk(needed, free_bytes(where), str(where))
        if "calibrate" in missing and setting.spread is None:
            require_memory(prediction, setting)
        if setting.spread is not None:
            return  # it has asked its own machines
        engine, device = setting.recipe.quantization.engine, resolve_devices(setting.device)[0]
        if engine != "stream":
            require_library_memory(prediction.source, device_memory(device), device, engine)


def _require_server(setting: Setting) -> None:
    if setting.recipe.evaluation.runtime == "reference":
        _require_installed("serve, with the runtime reference,", ("torch", "transformers"), "quantize")
    elif setting.vllm is None:
        raise UserError(
            "no vLLM was found to serve with, which this recipe needs.",
            hint="`make serving` builds one for a CPU; else set QUANTMINT_VLLM, or stop earlier with --until inspect.",
        )
    elif (launch := launch_plan(setting, "baseline", Path("MODEL"))).layout.nodes > 1:
        over_nodes(setting, setting.vllm, launch).require(launch)


def _require_packages(missing: Sequence[str]) -> None:
    """An hour of measuring must not end at a package that draws the page."""
    for stage, packages, extra in _PACKAGES:
        if any(key.startswith(stage) for key in missing):
            _require_installed(stage, packages, extra)


def _require_installed(stage: str, packages: Sequence[str], extra: str) -> None:
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        raise UserError(
            f"the stage {stage} needs {', '.join(absent)}, which is not installed.",
            hint=f"pip install 'quantmint[{extra}]'",
        )


def require_memory(prediction: Prediction, setting: Setting) -> None:
    """Raise `UserError` where the device is too small for a recipe that wants the whole 16-bit model on it."""
    device = resolve_devices(setting.device)[0]
    memory, calibration = device_memory(device), setting.recipe.calibration
    if calibration is not None and calibration.mode == "resident" and prediction.calibration_device > memory:
        raise UserError(
            "calibration.mode resident keeps the 16-bit model on one device: "
            f"{prediction.calibration_device / 1e9:,.1f} GB, {device} has {memory / 1e9:,.1f} GB.",
            hint="Take `mode: auto`, which runs what does not fit layer by layer.",
        )


def predict_for(setting: Setting, folder: Path) -> Prediction:
    """Predict from a folder with the weights, or from one that has only a config.json."""
    return predict(*model_for(setting, folder), setting.recipe)


def model_for(setting: Setting, folder: Path) -> tuple[Checkpoint, Structure]:
    """The headers of a folder with the weights, or those that its config.json stands for; and the model's structure."""
    trust = setting.recipe.trust_remote_code
    if any(folder.glob("*.safetensors")):
        source = open_checkpoint(folder)
        return source, read_structure(folder, source.tensors, trust_remote_code=trust)
    return imagine(folder, trust_remote_code=trust)
