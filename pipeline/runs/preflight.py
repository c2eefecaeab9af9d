"""What a run will take, and what it can be refused for before it starts.

How large things will be is exact where the layout decides (the checkpoint), an upper bound where the machine does
(calibration, serving). Refused is a run without vLLM, device, room on the disk, a signer or the right to publish.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.room import require_rounding_room
from quantmint.calibration.sets import load_set
from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import needs
from quantmint.pipeline.publish.places import published_folder
from quantmint.pipeline.quantize.device import device_memory, resolve_devices
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.engines.libraries.job import checkpoint_bytes
from quantmint.pipeline.quantize.engines.libraries.job import require_memory as require_library_memory
from quantmint.pipeline.quantize.engines.stream.layerwise import gptq_bytes
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.model.selection import kept_because, select
from quantmint.pipeline.quantize.model.structure import Structure, imagine, read_structure
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs.forecast import gptq_volume
from quantmint.pipeline.runs.planner import foreseen, missing_stages
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.stages.by_library import calibrated
from quantmint.pipeline.stages.calibrate import pinned_set, read_tokens
from quantmint.pipeline.stages.package import require_signer
from quantmint.pipeline.stages.publish import require_admission
from quantmint.pipeline.stages.serve import launch_plan, over_nodes
from quantmint.pipeline.stages.source import config_folder
from quantmint.pipeline.stages.stage import Planned, Setting
from quantmint.pipeline.store.disk import free_bytes

_TOKEN_BYTES = 8  # a token of prose has four
_OVERHEAD = 64 << 20  # bytes beside the weights: tokenizer, logs, samples, report
_LM_EVAL = ("lm_eval", "tenacity", "aiohttp", "requests")  # with what its client of an API imports
_PACKAGES = {  # of a stage, an engine and a runtime: our extra that brings them, and what is imported
    **dict.fromkeys(("calibrate", "sensitivity", "quantize", "reference"), ("quantize", ("torch", "transformers"))),
    "llmcompressor": ("llmcompressor", ("llmcompressor",)),
    "quark": ("quark", ("quark", "ninja")),
    "canary": ("evaluate", ("transformers",)),
    **dict.fromkeys(("evaluate", "control"), ("evaluate", _LM_EVAL)),
    "report": ("report", ("jinja2", "matplotlib")),
    "package": ("publish", ("jinja2", "detect_secrets", "cyclonedx")),
    "sign": ("publish", ("model_signing", "OpenSSL", "sigstore")),
}
_TASK_PACKAGES = {"ifeval": ("langdetect", "immutabledict", "nltk")}
"""What lm-eval's own tasks import when they are loaded, by a part of their names."""
_EMULATION = {"amd-quark": "quark"}
"""What a distribution that vLLM needs beside it is imported as."""
_ABSENT = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if not u.find_spec(n)]))"
_ANSWER_S = 60
_SERVED = ("serve", "canary", "evaluate", "control", "bench")  # what asks a server


@dataclass(frozen=True, slots=True)
class Prediction:
    """Sizes in bytes.

    ``quantized`` and ``kept`` count linear modules; ``calibration_device`` is what a resident model takes,
    ``largest_tensor`` bounds the engine's memory, a few of which it holds; ``weights_per_gpu`` is for the candidate.
    ``kept_because`` and ``copied`` count, by reason, modules that stay in 16 bit and tensors that are carried over.
    ``kv_bytes_per_token`` is for all layers over all GPUs, None for an architecture whose cache is not plain K and V.
    """

    parameters: int
    source: int
    checkpoint: int
    quantized: int
    kept: int
    largest_tensor: int
    calibration_device: int
    weights_per_gpu: int
    kv_bytes_per_token: int | None
    kept_because: Mapping[str, int]
    copied: Mapping[str, int]


def predict(source: Checkpoint, structure: Structure, recipe: Recipe) -> Prediction:
    """Predict from headers, real or imagined. Raises `UserError` for what the recipe cannot be applied to."""
    choice = select(structure, recipe.quantization)
    layout = recipe.quantization.format
    if recipe.quantization.engine == "stream":
        checkpoint = sum(plan.nbytes for plan in plan_shards(source, structure, choice, layout))
    else:
        checkpoint = checkpoint_bytes(source, structure, choice, layout)
    return Prediction(
        parameters=structure.parameters,
        source=source.nbytes,
        checkpoint=checkpoint,
        quantized=len(choice.schemes),
        kept=len(choice.kept),
        largest_tensor=max(info.nbytes for _, info in source.tensors.values()),
        calibration_device=source.nbytes if recipe.calibration is not None else 0,
        weights_per_gpu=-(-checkpoint // recipe.target.gpus),
        kv_bytes_per_token=_kv_bytes(source.config, 1 if choice.kv_cache else 2),
        kept_because=kept_because(structure, choice, recipe.quantization),
        copied=structure.copied,
    )


def disk_needed(
    prediction: Prediction, missing: Collection[str], setting: Setting, plan: Sequence[Planned] = ()
) -> dict[str, int]:
    """Bytes that stages which are not cached will write here, by purpose, less what an attempt of ``plan`` wrote."""
    needed: dict[str, int] = {}
    if "source" in missing and setting.source.folder is None:
        needed["download"] = prediction.source
    if "quantize" in missing:
        begun = [
            setting.store.begun(planned.family, planned.fingerprint) for planned in plan if planned.key == "quantize"
        ]
        needed["checkpoint"] = max(prediction.checkpoint - sum(begun), 0)
    if "publish" in missing and setting.recipe.publish.folder is not None:
        needed["published copy"] = prediction.checkpoint
    return {**needed, "logs and samples": _OVERHEAD} if needed else {}


def require_disk(needed: Mapping[str, int], free: int, where: str) -> None:
    """Raise `UserError` where the disk is too small for what is still to be written."""
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size(count)}" for name, count in needed.items())
        raise UserError(
            f"{where}: {size(total)} are needed ({parts}), {size(free)} are free.",
            hint="Free space, or write to another disk; `quantmint gc` removes from a store what no recent run uses.",
        )


def require_room_to_publish(setting: Setting, prediction: Prediction, missing: Collection[str]) -> None:
    """Raise `UserError` where the folder to publish to lies on a disk, maybe another one, that is too small for it."""
    folder = published_folder(setting.recipe, setting.home)
    if folder is not None and "publish" in missing:
        require_disk({"published copy": prediction.checkpoint}, free_bytes(folder), f"publish.folder: {folder}")


def require_tokens(setting: Setting, missing: Collection[str]) -> None:
    """Raise `RecipeError` where texts that lie beside a recipe make fewer tokens than its samples take.

    A large file is not counted, and neither is one whose model lies elsewhere.
    """
    section, folder = setting.recipe.calibration, setting.source.folder
    read = ("quantize" in missing and calibrated(setting.recipe.quantization)) or "sensitivity" in missing
    if section is None or folder is None or not read:
        return
    file = load_set(section.set).file
    if file is None or file.stat().st_size > _TOKEN_BYTES * section.samples * section.sequence_length:
        return
    try:
        read_tokens(section, folder, trust_remote_code=setting.recipe.trust_remote_code)
    except CalibrationError as error:
        refuse([setting.loaded.fault(("calibration", "samples"), str(error))])
    except Exception:  # a tokenizer may be anybody's: the run that needs it tells what it lacks
        return


def _kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """2 * layers * kv heads * head_dim * bytes; the formula of vLLM for grouped-query attention."""
    text = config.get("text_config") or config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    layers = text.get("num_hidden_layers")
    if text.get("kv_lora_rank") or not (heads and hidden and layers):
        return None
    head_dim = text.get("head_dim") or hidden // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * head_dim * width)


def require_means(
    plan: Sequence[Planned], setting: Setting, redo: Collection[str] = (), *, prediction: Prediction | None = None
) -> None:
    """Raise `UserError` where a run could not come to its end; ``prediction`` is what was predicted already.

    Packages count too, those of this environment and of vLLM's: hours must not end at one that draws the page.
    """
    plan = foreseen(plan, setting, redo)
    missing = missing_stages(plan, setting, redo)
    _require_packages(plan, setting, missing)
    if "sign" in missing:
        require_signer(setting)
    if "publish" in missing:
        require_admission(setting)
    if {"calibrate", "sensitivity"} & set(missing) and setting.recipe.calibration is not None:
        pinned_set(setting.recipe.calibration)
    if any(key.startswith(_SERVED) for key in missing):
        _require_server(setting, missing)
    if "quantize" in missing:
        prediction = prediction or predict(*model_for(setting, config_folder(setting.source)), setting.recipe)
        where = setting.store.root.absolute()
        require_disk(disk_needed(prediction, missing, setting, plan), free_bytes(where), str(where))
        require_room_to_publish(setting, prediction, missing)
        engine = setting.recipe.quantization.engine
        if setting.spread is None:  # which asks its own machines
            device = resolve_devices(setting.device)[0]  # one that is not there is refused before anything is made
            if engine != "stream":
                require_library_memory(prediction.source, device_memory(device), device, engine)
            elif setting.recipe.quantization.algorithm == "gptq":
                _require_gptq_memory(setting, device)


def _require_gptq_memory(setting: Setting, device: str) -> None:
    """Raise `UserError` where a device is too small for GPTQ, before anything is made."""
    source, structure = model_for(setting, config_folder(setting.source))
    need = gptq_volume(source, structure, setting.recipe).need
    rounding = gptq_bytes(structure, select(structure, setting.recipe.quantization).schemes)
    try:
        require_rounding_room(need, rounding, device_memory(device), device)
    except CalibrationError as error:
        raise UserError(f"quantization.algorithm: {error}.") from None


def _require_server(setting: Setting, missing: Collection[str]) -> None:
    if setting.recipe.evaluation.runtime == "reference":
        return
    if setting.vllm is None:
        raise UserError(
            "no vLLM was found to serve with, which this recipe needs.",
            hint="`make serving` builds one for a CPU; else set QUANTMINT_VLLM, or stop earlier with --until inspect.",
        )
    _require_vllms_packages(setting, setting.vllm, missing)
    launch = launch_plan(setting, "baseline", Path("MODEL"))
    if launch.layout.nodes > 1:
        over_nodes(setting, setting.vllm, launch).require(launch)


def _require_packages(plan: Sequence[Planned], setting: Setting, missing: Collection[str]) -> None:
    """Raise `UserError`, with our extra that has it, for what is not installed here, where stages and lm-eval run."""
    for extra, name in _packages(plan, setting, missing):
        if find_spec(name) is None:
            raise UserError(f"this needs {name}, which is not installed.", hint=f"pip install 'quantmint[{extra}]'")


def _packages(plan: Sequence[Planned], setting: Setting, missing: Collection[str]) -> Iterator[tuple[str, str]]:
    """What is imported on the way of the stages that would run, each with our extra that brings it."""
    quantization, runtime = setting.recipe.quantization, setting.recipe.evaluation.runtime
    users = [planned.family for planned in plan if planned.key in missing]
    if any(family in _SERVED for family in users):
        users.append(runtime)
    if "quantize" in missing:
        users.append(quantization.engine)
    for user in dict.fromkeys(users):
        extra, names = _PACKAGES.get(user, ("", ()))
        yield from ((extra, name) for name in names)
    if "evaluate" in users:
        for task in setting.suite.tasks:
            for part, names in _TASK_PACKAGES.items():
                yield from (("evaluate", name) for name in names if part in task.task)
    if "quantize" in missing:
        support = algorithm(quantization.algorithm).engines.get(quantization.engine)
        if support is not None and support.package is not None:
            yield quantization.engine, support.package.replace("-", "_")


def _require_vllms_packages(setting: Setting, vllm: VllmEnvironment, missing: Collection[str]) -> None:
    """Raise `UserError` for what vLLM would import in its own environment, and does not find there."""
    quantization = setting.recipe.quantization
    if "serve-candidate" not in missing:
        return
    made = (quantization.scheme, quantization.kv_cache, quantization.format)
    needed = {_EMULATION.get(name, name): name for name in needs(setting.recipe.target.hardware, *made)}
    if not needed:
        return
    absent = [needed[name] for name in _absent_in(vllm.python, needed)]
    if absent:
        install = f"{vllm.python} -m pip install {' '.join(absent)}"
        raise UserError(f"vLLM's environment lacks {', '.join(absent)}, which this run needs there.", hint=install)


def _absent_in(python: Path, names: Collection[str]) -> list[str]:
    """The modules that an interpreter does not find; none where it gives no answer, which its server will."""
    command = [str(python), "-P", "-c", _ABSENT, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        return [str(name) for name in json.loads(done.stdout)]
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return []


def model_for(setting: Setting, folder: Path) -> tuple[Checkpoint, Structure]:
    """The headers of a folder with the weights, or those that its config.json stands for; and the model's structure."""
    trust = setting.recipe.trust_remote_code
    if any(folder.glob("*.safetensors")):
        source = open_checkpoint(folder)
        return source, read_structure(folder, source.tensors, trust_remote_code=trust)
    return imagine(folder, trust_remote_code=trust)
