"""calibrate: measure the 16-bit model's ranges on a calibration set, for every scheme and layout of the model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantmint.calibration.batches import at_commit, batched, read_texts, rendered, samples_digest, samples_of
from quantmint.calibration.calibrate import Execution, calibrate
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch
from quantmint.calibration.sets import DEFAULTS, CalibrationSet, load_set
from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.quantize.device import resolve_devices
from quantmint.pipeline.quantize.model.builder import light_imports
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.recipe.faults import Fault
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Commits, Setting
from quantmint.pipeline.stages.source import model_folder, require_tokenizer
from quantmint.pipeline.stages.stage import MODEL_MODULES, Check, Job, Output, Stage, write_json
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here

RANGES = "ranges.safetensors"
_TOKEN_BYTES = 8
"""Bytes of a token, above those of prose, which has four."""
_LAYERS = "layers"  # what an interrupted run in layer mode is gone on with


class CalibrateStage(Stage):
    """Measure the ranges of a 16-bit model's activations.

    In layer mode an interrupted run resumes at the current layer.
    """

    family = "calibrate"
    version = 1
    needs = ("source",)
    packages = ("torch", "transformers", "tokenizers")
    by_content = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the stream engine makes the checkpoint and any of its scales is static."""
        return super().is_planned(setting) and needs_ranges(setting.recipe.quantization)

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return torch and transformers, with the extra "quantize"."""
        return MODEL_MODULES

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_pinned_set`."""
        return (require_pinned_set,)

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the forecast seconds of running the model over the calibration set, None where nothing is known."""
        return estimate.weights.get(self.key)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what determines the ranges: the calibration data, the observation, and whether model code is trusted.

        Devices and machines are left out, because they change no bit.
        """
        section = setting.recipe.calibration
        assert section is not None  # noqa: S101 - the recipe's checks
        return {
            **data_identity(section, setting.commits),
            "observation": asdict(section.observation),
            "trust_remote_code": setting.recipe.trust_remote_code,
        }

    def run(self, job: Job) -> Output:
        """Run every batch through the model, resident or layer by layer."""
        section, began = job.setting.recipe.calibration, time.monotonic()
        assert section is not None  # noqa: S101 - as above
        folder = model_folder(job.inputs["source"])
        trust = job.setting.recipe.trust_remote_code
        spread, places = job.setting.spread, None
        devices = resolve_devices(job.setting.device) if spread is None else ("cpu",)  # where nothing is computed
        try:
            job.progress.say("reading the calibration texts")
            samples = read_tokens(section, folder, trust_remote_code=trust)
            places = None if spread is None else spread.places(folder)
            outcome = calibrate(
                folder,
                list(batched(samples, section.batch_size)),
                section.observation,
                Execution(
                    devices=devices,
                    work=job.path / _LAYERS,
                    mode=section.mode,
                    activation_bytes=section.activation_bytes,
                    elsewhere=places,
                ),
                watcher=job.progress,
                trust_remote_code=trust,
            )
        finally:
            if spread is not None:
                spread.release()  # the model is still loaded there
        ranges = outcome.ranges
        ranges.save(job.path / RANGES)
        write_json(job.path / ENVIRONMENT, environment_here(self.tools(job.setting)).to_json())
        tokens = sum(len(sample) for sample in samples)
        return Output(
            result={
                "tokens": tokens,
                "tokens_sha256": samples_digest(samples),
                "linear": len(ranges.inputs),
                "mode": outcome.decision.mode,
                "mode_reason": outcome.decision.reason,
                "devices": list(devices if places is None else places.free),
                "observation": asdict(section.observation),
                "warnings": list(outcome.warnings),
                "seconds": round(time.monotonic() - began, 1),
            },
            summary=f"{len(ranges.keys)} attention layers, {len(ranges.inputs)} linear inputs over {tokens:,} tokens, "
            f"{outcome.decision.mode}",
        )


def data_identity(section: Calibration, commits: Commits) -> Mapping[str, object]:
    """Return what determines the tokens of a calibration and their batches, for a fingerprint."""
    return {
        "set": set_identity(section.set, commits),
        "samples": section.samples,
        "sequence_length": section.sequence_length,
        "packing": section.packing,
        "batch_size": section.batch_size,
        "seed": section.seed,
    }


def texts_of(entries: Mapping[str, Entry]) -> Mapping[str, Any] | None:
    """Return the calibration set as recorded by the entry that read it: `calibrate`, `sensitivity` or `quantize`.

    None where none of them read calibration texts.
    """
    measuring = next((key for key in ("calibrate", "sensitivity") if key in entries), None)
    settings: Any = entries[measuring or "quantize"].record.payload["settings"]
    section = settings if measuring else settings.get("calibration")
    return section["set"] if section else None


def set_name(named: str) -> str:
    """Return the short name of a calibration set, given by name or as the path of its YAML file."""
    return named.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")


def read_tokens(section: Calibration, folder: Path, *, trust_remote_code: bool) -> Sequence[torch.Tensor]:
    """Return the calibration samples as token ids, int64 [n] each, by the tokenizer of the model in ``folder``.

    Raises `CalibrationError` for texts that cannot be read or are too few, `UserError` without a tokenizer and for a
    set whose commit cannot be resolved.
    """
    require_tokenizer(folder)
    with light_imports():
        # The model is built next, and takes what it needs from what was imported here.
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    chosen = pinned_set(section)
    samples: Sequence[torch.Tensor] = samples_of(
        read_texts(chosen, tokenizer),
        tokenizer,
        samples=section.samples,
        sequence_length=section.sequence_length,
        packing=section.packing,
        seed=section.seed,
        special_tokens=not rendered(chosen, tokenizer),
    )
    return samples


def needs_ranges(quantization: Quantization) -> bool:
    """Return whether our stream engine needs measured ranges for static scales; libraries measure their own."""
    return quantization.engine == "stream" and has_static_scales(quantization)


def has_static_scales(quantization: Quantization) -> bool:
    """Return whether calibration data determines scales of the checkpoint: of an FP8 KV cache or of inputs."""
    return quantization.kv_cache == "fp8" or any(scheme(name).needs_ranges for name in quantization.schemes)


def token_fault(loaded: LoadedRecipe, folder: Path | None) -> Fault | None:
    """Return a fault if the calibration texts have fewer tokens than the samples need, else None.

    Only small local files are counted, by the tokenizer of the model in ``folder``; without a folder nothing is.
    """
    section = loaded.recipe.calibration
    if section is None or folder is None:
        return None
    file = load_set(section.set).file
    if file is None or file.stat().st_size > _TOKEN_BYTES * section.samples * section.sequence_length:
        return None
    try:
        read_tokens(section, folder, trust_remote_code=loaded.recipe.trust_remote_code)
    except CalibrationError as error:
        return loaded.fault(("calibration", "samples"), str(error))
    except Exception:  # a tokenizer may be anybody's: the run that needs it says what it lacks
        return None
    return None


def require_pinned_set(setting: Setting) -> None:
    """Raise `UserError` where the commit of the recipe's calibration set cannot be resolved."""
    if setting.recipe.calibration is not None:
        pinned_set(setting.recipe.calibration)


def pinned_set(section: Calibration) -> CalibrationSet:
    """Return the calibration set that a recipe calibrates with; see `pinned`."""
    return pinned(section.set)


def pinned(name: str) -> CalibrationSet:
    """Return a calibration set by its name or path, with a data set of the Hub at a commit.

    Raises `UserError` where the set or its commit cannot be found.
    """
    try:
        return at_commit(load_set(name))
    except CalibrationError as error:
        raise UserError(f"calibration set {name}: {error}.", transient=is_transient(error)) from None


def set_identity(name: str, commits: Commits) -> Mapping[str, object]:
    """Return the set by its content: the digest of a local file, or repository and commit of a data set.

    Where the Hub cannot be asked the branch stands for the commit: such a plan can be shown, but `pinned_set` refuses
    to run it. Raises `UserError` for a local file that cannot be read.
    """
    chosen = load_set(name)
    with suppress(CalibrationError, QuantmintError):
        chosen = at_commit(chosen, commits.dataset)
    facts = asdict(chosen)
    try:
        facts["file"] = None if chosen.file is None else sha256_of(chosen.file)
    except OSError as error:
        raise UserError(f"{chosen.file}: the calibration texts cannot be read: {error.strerror}.") from None
    return {key: value for key, value in facts.items() if key not in ("name", "description", *DEFAULTS)}
