"""quantize: write the checkpoint from the 16-bit shards and the ranges."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from quantmint.calibration.batches import batched
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch
from quantmint.calibration.ranges import load_ranges
from quantmint.calibration.room import learning_place, require_learning_room, require_rounding_room
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.device import device_memory, device_title, resolve_devices
from quantmint.pipeline.quantize.digest import stray_files
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.engines.libraries.job import require_memory as require_library_memory
from quantmint.pipeline.quantize.engines.stream.engine import (
    CheckpointPlan,
    scale_ranges,
    write_checkpoint,
)
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq.latents import LATENT_BYTES
from quantmint.pipeline.quantize.gptq.loop import quantize_layers
from quantmint.pipeline.quantize.gptq.request import GptqRequest, GptqResult, GptqSettings, Tuning
from quantmint.pipeline.quantize.gptq.solve import gptq_bytes
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.model.loader import load_view
from quantmint.pipeline.quantize.model.selection import ABSORBED_BITS, select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.load import choice_yaml
from quantmint.pipeline.recipe.modules import assigned, expert_count, text_config
from quantmint.pipeline.recipe.quantization import AUTO, Gptq, Quantization
from quantmint.pipeline.stages import by_library
from quantmint.pipeline.stages.calibrate import RANGES, needs_ranges, read_tokens
from quantmint.pipeline.stages.cost import gptq_volume, learned_weights, tuning_batch
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction, model_for, planned_shards
from quantmint.pipeline.stages.source import CHECKPOINT as CHECKPOINT
from quantmint.pipeline.stages.source import config_folder, read_source
from quantmint.pipeline.stages.stage import MODEL_MODULES, Check, Job, Output, Stage, write_json
from quantmint.pipeline.store.entries import Entry, FileFact
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here

ERRORS = "errors.json"
GAINS = "gains.json"
CHANGED = "ranges.json"
OVERRIDES = "overrides.yaml"
_WORK = "rounding"
_MANIFEST = "manifest.jsonl"


class QuantizeStage(Stage):
    """Write the checkpoint; an interrupted run resumes at the first shard that the working folder's manifest lacks."""

    family = "quantize"
    version = 2
    by_content = True

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage keys of `source` and, where scales are static, of `calibrate`."""
        calibrated = {"calibrate": "calibrate"} if needs_ranges(setting.recipe.quantization) else {}
        return {"source": "source", **calibrated}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the quantization section, and the calibration data where the engine or algorithm reads it itself."""
        quantization = setting.recipe.quantization
        library = {} if _is_plain(quantization) else by_library.settings(setting)
        section = quantization.model_dump(mode="json")
        if quantization.engine == "stream" and quantization.gptq is not None:
            section["gptq"]["block_size"] = Gptq().block_size  # only libraries' results depend on it
        return {
            **section,
            "trust_remote_code": setting.recipe.trust_remote_code,
            **library,
            **_revisions(quantization, setting.config),
            **({} if quantization.algorithm == "none" else setting.recipe.mx_settings),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of torch and transformers and, with an algorithm or library, of its distributions."""
        library = {} if _is_plain(setting.recipe.quantization) else by_library.tools(setting)
        return {**versions("torch", "transformers"), **library}

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Yield (extra, module) pairs of the engine's imports, a library's own modules included."""
        quantization = setting.recipe.quantization
        yield from MODEL_MODULES
        yield from ((quantization.engine, name) for name in by_library.MODULES.get(quantization.engine, ()))
        support = algorithm(quantization.algorithm).engines.get(quantization.engine)
        if support is not None and support.package is not None:
            yield quantization.engine, support.package.replace("-", "_")

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `_require_memory`; none where the stage runs on other machines, which check their own memory."""
        return () if setting.spread is not None else (_require_memory,)

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes of the checkpoint, and of GPTQ's files, without those that an earlier attempt wrote."""
        layers = {"layers of GPTQ": max(size.temporary - begun, 0)} if size.temporary else {}
        return {"checkpoint": max(size.checkpoint - max(begun - size.temporary, 0), 0), **layers}

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the seconds of reading, quantizing and writing; None for a library, whose time is not known."""
        return estimate.weights.get(self.key)

    def run(self, job: Job) -> Output:
        """Make the checkpoint by the engine that the recipe names."""
        streamed = job.setting.recipe.quantization.engine == "stream"
        output = self._stream(job) if streamed else by_library.run(job)
        write_json(job.path / ENVIRONMENT, environment_here(self.tools(job.setting)).to_json())
        auto: dict[str, object] = {}
        if job.setting.chosen is not None:
            auto = {"auto": job.setting.chosen.to_json()}
            (job.path / OVERRIDES).write_text(choice_yaml(job.setting.recipe.quantization), encoding="utf-8")
        return replace(output, result={**output.result, **auto, "hardware": _hardware(job.setting)})

    def _stream(self, job: Job) -> Output:
        """Make the checkpoint by our stream engine, after GPTQ if the recipe asks for it."""
        quantization = job.setting.recipe.quantization
        trust, spread = job.setting.recipe.trust_remote_code, job.setting.spread
        job.progress.say("asking the model which of its modules are linear")
        source, structure = read_source(job)
        if strays := stray_files(source.folder):
            job.progress.warn(f"{', '.join(strays)}: no model's files, so they are not copied with it")
        choice = select(structure, quantization)
        plans = planned_shards(source, structure, job.setting.recipe)
        scales = _ranges(job, choice)
        latent = _proven_latent(job) if structure.latent and quantization.kv_cache == "fp8" else None
        gained: Mapping[str, object] = {}
        outputs: Mapping[str, float] = {}
        if quantization.algorithm != "none":
            rounded, gained = _rounded(job, source, structure, choice, plans, scales)
            plans, scales = rounded.plans, {**scales, **rounded.ranges}
            outputs = {name: gain.output_db for name, gain in rounded.gains.items() if gain.output_db is not None}
        with job.progress.bar(sum(plan.read_bytes for plan in plans), "B") as advance:
            written = write_checkpoint(
                CheckpointPlan(
                    source,
                    plans,
                    choice,
                    scales,
                    checkpoint_format=quantization.format,
                    with_code=trust,
                    algorithms=_recorded(quantization),
                ),
                job.path / CHECKPOINT,
                manifest=job.path / _MANIFEST,
                devices=("cpu",) if spread else resolve_devices(job.setting.device),
                advance=advance,
                write=None if spread is None else spread.write_shards,
            )
        if spread is not None:
            spread.release()  # what follows may want the GPUs of this machine
        write_json(job.path / ERRORS, _errors(written.errors, outputs))
        (job.path / _MANIFEST).unlink()
        shutil.rmtree(job.path / _WORK, ignore_errors=True)
        size = sum(shard.size for shard in written.shards)
        tensor_bytes = sum(plan.nbytes - len(plan.header) for plan in plans)
        return Output(
            result={
                "bytes": size,
                "tensor_bytes": tensor_bytes,
                "modules": len(choice.schemes),
                "kept": len(choice.kept),
                "seconds": {kind: round(spent, 3) for kind, spent in sorted(written.seconds.items())},
                **gained,
                **({} if latent is None else {"latent": latent}),
            },
            summary=f"{size / 1e6:,.1f} MB from {source.nbytes / 1e6:,.1f} MB, {len(choice.schemes)} modules",
            known={f"{CHECKPOINT}/{shard.name}": (shard.size, shard.sha256) for shard in written.shards},
        )


def _errors(errors: Mapping[str, Error], outputs: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Return for each module the SQNR in dB of the rows that were compared on the way, None for no noise, as JSON.

    With it the number of compared elements, and of the modules in ``outputs`` the SQNR of their outputs.
    """
    return {
        module: {
            "sqnr_db": error.sqnr_db if math.isfinite(error.sqnr_db) else None,
            "compared": error.count,
            **({"output_db": outputs[module]} if module in outputs else {}),
        }
        for module, error in sorted(errors.items())
    }


def _revisions(quantization: Quantization, config: Mapping[str, Any]) -> dict[str, str]:
    """Return facts for the fingerprint where this version writes other bytes than earlier ones with the same settings.

    Empty for models whose bytes did not change, so that they keep their fingerprints.
    """
    facts: dict[str, str] = {}
    kind = text_config(config).get("model_type")
    if quantization.by_layers:
        if expert_count(config):  # experts of a mixture were once left to the nearest
            facts["experts"] = "gptq"
        if kind in _DROPOUTS:
            facts["dropouts"] = "passed"
        if quantization.parameters["compensation"]:  # it once knew neither bound nor held-out tokens
            facts["compensation"] = "bounded"
        if any(name.startswith("mxfp6") for name in quantization.schemes):  # once left to the nearest
            facts["mxfp6"] = "gptq"
    if kind == "phi4_multimodal":  # its encoders, which lie inside the decoder, were once quantized
        facts["towers"] = "16 bit"
    if _absorbs_narrow(quantization, config):  # what vLLM absorbs was once quantized to any scheme
        facts["absorbed"] = "16 bit"
    return facts


_DROPOUTS = frozenset({"gpt_neox", "phi3", "phi4_multimodal"})
"""Types of models whose layers have a dropout behind a sublayer, which hands on the sublayer's own result.

GPTQ once took the dropout for the end of the sublayer's last projection, and rounded what follows for other inputs."""


def _absorbs_narrow(quantization: Quantization, config: Mapping[str, Any]) -> bool:
    """Return whether the recipe gives fewer than 8 bits to projections that vLLM absorbs, which stay in 16 bit."""
    text = text_config(config)
    if text.get("kv_lora_rank") is None:
        return False
    layers = range(int(text.get("num_hidden_layers") or 0))
    assignments = {assigned(quantization, f"model.layers.{layer}.self_attn.kv_b_proj") for layer in layers} - {None}
    names = quantization.schemes if AUTO in assignments else assignments
    narrow = any(scheme(name).weight.bits < ABSORBED_BITS for name in names if name is not None)
    view = load_view(config) if narrow else None
    return view is not None and view.has_absorbed


def _recorded(quantization: Quantization) -> tuple[str, ...]:
    """Return the algorithms that the checkpoint records, in the order in which they run.

    "awq" stands for scaling, and for tuning, which changes norms too and has no name in either layout.
    """
    tuned = quantization.algorithm == "tuned"
    algorithms = () if quantization.algorithm == "none" else ("gptq" if tuned else quantization.algorithm,)
    return (*(("awq",) if tuned or quantization.parameters.get("scaling") else ()), *algorithms)


def _is_plain(quantization: Quantization) -> bool:
    """Return whether our stream engine makes the checkpoint without an algorithm, so that the weights alone decide."""
    return quantization.engine == "stream" and quantization.algorithm == "none"


def _rounded(
    job: Job,
    source: Checkpoint,
    structure: Structure,
    choice: Choice,
    plans: tuple[ShardPlan, ...],
    scales: Mapping[str, torch.Tensor],
) -> tuple[GptqResult, Mapping[str, object]]:
    """Round the layers' weights by GPTQ on the calibration texts; return its result, and a summary for the record.

    Gains by module are written to `GAINS`, ranges of inputs that changed on the way to `CHANGED`.
    """
    quantization, section = job.setting.recipe.quantization, job.setting.recipe.calibration
    trust = job.setting.recipe.trust_remote_code
    assert section is not None  # noqa: S101 - the recipe's checks
    job.progress.say("reading the calibration texts")
    samples = read_tokens(section, source.folder, trust_remote_code=trust)
    request = GptqRequest(
        plans,
        structure,
        choice,
        source.folder,
        list(batched(samples, tuning_batch(job.setting.recipe))),
        scales,
        resolve_devices(job.setting.device),
        job.path / _WORK,
        GptqSettings.of(quantization.parameters),
        activation_bytes=section.activation_bytes,
        trust_remote_code=trust,
        mx_scales=job.setting.recipe.mx_scales,
    )
    rounded = quantize_layers(request, job.progress.bar)
    write_json(job.path / GAINS, {name: asdict(gain) for name, gain in sorted(rounded.gains.items())})
    sums = [
        sum(getattr(gain, side) for gain in rounded.gains.values() if gain.fault is None)
        for side in ("after", "before")
    ]
    to_nearest = [*rounded.untouched, *(name for name, gain in rounded.gains.items() if gain.fault is not None)]
    nearest = f"rounded to the nearest, without {quantization.algorithm}"
    pooled = [name for name, gain in rounded.gains.items() if gain.pooled]
    named = ((nearest, to_nearest), ("rounded for the tokens of its layer, as few reach it", pooled))
    for what, names in (*named, ("its channels cannot be scaled", rounded.unscaled)):
        if names:
            others_note = f" and {len(names) - 1} more" if len(names) > 1 else ""
            job.progress.warn(f"{what}: {names[0]}{others_note}")
    compared = [gain.compensation for gain in rounded.gains.values() if gain.compensation is not None]
    plain = compared.count(0.0)
    if plain:
        job.progress.say(f"{plain} of {len(compared)} modules are not compensated: held-out tokens gain nothing by it")
    if rounded.ranges:
        write_json(job.path / CHANGED, {name: float(largest) for name, largest in sorted(rounded.ranges.items())})
    return rounded, {
        quantization.algorithm: {
            "modules": len(rounded.gains),
            "to_nearest": len(to_nearest),
            "cost": round(sums[0] / sums[1], 4) if sums[1] else None,
            **({"compared": len(compared), "plain_targets": plain} if compared else {}),
            **_tuned_facts(job, rounded.tuning),
        }
    }


def _tuned_facts(job: Job, tuning: Tuning | None) -> dict[str, object]:
    """Return the divergence on held-out samples before and after tuning, and say it; nothing without tuning."""
    if tuning is None:
        return {}
    better = f"the norms of step {tuning.step} are stored" if tuning.step else "no step was better, nothing is changed"
    if tuning.moved:
        better += f", and {tuning.moved:.2%} of the weights are rounded otherwise"
    job.progress.say(
        f"tuning: on held-out samples KL is {tuning.after:.4g} nats for {tuning.before:.4g} before; {better}"
    )
    learned = {"moved": round(tuning.moved, 6)} if tuning.moved else {}
    divergences = {"held_out_kl": round(tuning.after, 5), "held_out_kl_before": round(tuning.before, 5)}
    return {**divergences, "step": tuning.step, **learned}


def _hardware(setting: Setting) -> str:
    if setting.spread is not None:
        return setting.spread.hardware
    devices = resolve_devices(setting.device)
    # Libraries compute on the first.
    return device_title(devices if setting.recipe.quantization.engine == "stream" else devices[:1])


def checkpoint_files(entry: Entry) -> dict[str, FileFact]:
    """Return size and SHA-256 of a checkpoint's files, by their names in its folder."""
    prefix, files = f"{CHECKPOINT}/", entry.record.files.items()
    return {name.removeprefix(prefix): fact for name, fact in files if name.startswith(prefix)}


def _ranges(job: Job, choice: Choice) -> Mapping[str, torch.Tensor]:
    if "calibrate" not in job.inputs:
        return {}
    ranges = load_ranges(job.inputs["calibrate"].file(RANGES))
    return scale_ranges(ranges, choice, job.setting.recipe.quantization.format)


def _proven_latent(job: Job) -> dict[str, float]:
    """Return "largest", the largest latent that was measured, and "limit", the target's largest FP8 number.

    Raises `UserError` where an FP8 cache, which has no scale for latents, would clip.
    """
    latents = load_ranges(job.inputs["calibrate"].file(RANGES)).latents
    target = job.setting.recipe.target.hardware
    limit = hardware(target).fp8_max
    largest, module = max((float(amax.max()), module) for module, amax in latents.items())
    if largest > limit:
        raise UserError(
            f"quantization.kv_cache: found fp8 for a latent cache whose largest number is {largest:.4g} in {module}, "
            f"expected at most {limit:g}: vLLM caches latents by a scale of 1.0 on {target}, and would clip it.",
            hint="Set `kv_cache: auto`.",
        )
    return {"largest": largest, "limit": limit}


def _require_memory(setting: Setting) -> None:
    """Raise `UserError` where the device is missing, or its memory too small for a library or for GPTQ.

    For weights whose rounding is learned, the host's memory counts where the device's is too small.
    """
    quantization, device = setting.recipe.quantization, resolve_devices(setting.device)[0]
    if quantization.engine == "stream" and not quantization.by_layers:
        return
    source, structure = model_for(setting, config_folder(setting.source))
    if quantization.engine != "stream":
        require_library_memory(source.nbytes, device_memory(device), device, quantization.engine)
        return
    need = gptq_volume(source, structure, setting.recipe).need
    choice, free = select(structure, quantization), device_memory(device)
    rounding = gptq_bytes(structure, choice.schemes, on_gpu=device != "cpu")
    learned = LATENT_BYTES * sum(learned_weights(structure, choice, quantization).values())
    place = learning_place(learned, need.weights, device, free)
    try:
        require_rounding_room(need, rounding, free, device)
        require_learning_room(learned, place, device_memory(place))
    except CalibrationError as error:
        raise UserError(f"quantization.algorithm: {error}.") from None
