"""quantize: the 16-bit shards and the ranges, made into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.base.errors import StageError
from pipeline.base.machine import versions
from pipeline.quantize.device import device_title, resolve_devices
from pipeline.quantize.engines.stream.engine import scale_ranges, write_checkpoint
from pipeline.quantize.engines.stream.plan import plan_shards
from pipeline.quantize.engines.stream.shard import Error
from pipeline.quantize.formats.checkpoint import open_checkpoint
from pipeline.quantize.formats.layout import Choice
from pipeline.quantize.model.structure import read_structure, select
from pipeline.recipe.schema import Quantization
from pipeline.stages import by_library
from pipeline.stages.calibrate import RANGES
from pipeline.stages.source import model_folder
from pipeline.stages.stage import Job, Output, Setting, Stage, write_json
from pipeline.store.disk import free_bytes
from pipeline.store.toolchain import ENVIRONMENT, environment_here

if TYPE_CHECKING:
    import torch

CHECKPOINT = "checkpoint"
ERRORS = "errors.json"
_MANIFEST = "manifest.jsonl"


@dataclass(frozen=True, slots=True)
class QuantizeStage(Stage):
    """Resumes at the first shard that is not in the manifest of its working folder."""

    key: str = "quantize"
    family: str = "quantize"
    version: int = 2

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The model, and its ranges where a scale is static."""
        calibrated = {"calibrate": "calibrate"} if needs_ranges(setting.recipe.quantization) else {}
        return {"source": "source", **calibrated}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The whole section, and the calibration data where a library reads it itself."""
        own = {} if setting.recipe.quantization.engine == "stream" else by_library.settings(setting)
        return {
            **setting.recipe.quantization.model_dump(mode="json"),
            "trust_remote_code": setting.recipe.trust_remote_code,
            **own,
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """PyTorch rounds; transformers says what is linear."""
        own = {} if setting.recipe.quantization.engine == "stream" else by_library.tools(setting)
        return {**versions("torch", "transformers"), **own}

    def run(self, job: Job) -> Output:
        """Make the checkpoint by the engine that the recipe names."""
        streamed = job.setting.recipe.quantization.engine == "stream"
        output = self._stream(job) if streamed else by_library.run(job)
        write_json(job.path / ENVIRONMENT, environment_here(self.tools(job.setting)).to_json())
        return replace(output, result={**output.result, "hardware": _hardware(job.setting)})

    def _stream(self, job: Job) -> Output:
        """Stream every shard through the scheme's kernel."""
        quantization = job.setting.recipe.quantization
        trust, spread = job.setting.recipe.trust_remote_code, job.setting.spread
        source = open_checkpoint(model_folder(job.inputs["source"]))
        job.progress.say("asking the model which of its modules are linear")
        structure = read_structure(source.folder, source.tensors, trust_remote_code=trust)
        choice = select(structure, quantization)
        plans = plan_shards(source, structure, choice, quantization.format, shared_scales=quantization.shared_scales)
        needed, free = sum(plan.nbytes for plan in plans), free_bytes(job.path)
        present = sum(path.stat().st_size for path in (job.path / CHECKPOINT).glob("*.safetensors"))
        if needed - present > free:
            raise StageError(f"{job.path}: the checkpoint takes {needed:,} bytes, {free:,} are free.")
        with job.progress.bar(sum(plan.read_bytes for plan in plans), "B") as advance:
            written = write_checkpoint(
                source,
                plans,
                choice,
                _ranges(job, choice),
                job.path / CHECKPOINT,
                checkpoint_format=quantization.format,
                manifest=job.path / _MANIFEST,
                devices=("cpu",) if spread else resolve_devices(job.setting.device),
                with_code=trust,
                advance=advance,
                write=None if spread is None else spread.write_shards,
            )
        if spread is not None:
            spread.release()  # what follows may want the GPUs of this machine
        write_json(job.path / ERRORS, {module: _error(error) for module, error in sorted(written.errors.items())})
        (job.path / _MANIFEST).unlink()
        size = sum(shard.size for shard in written.shards)
        tensor_bytes = sum(plan.nbytes - len(plan.header) for plan in plans)
        return Output(
            result={
                "bytes": size,
                "tensor_bytes": tensor_bytes,
                "modules": len(choice.schemes),
                "kept": len(choice.kept),
                "seconds": {kind: round(spent, 3) for kind, spent in sorted(written.seconds.items())},
            },
            summary=f"{size / 1e6:,.1f} MB from {source.nbytes / 1e6:,.1f} MB, {len(choice.schemes)} modules",
            known={f"{CHECKPOINT}/{shard.name}": (shard.size, shard.sha256) for shard in written.shards},
        )


def _hardware(setting: Setting) -> str:
    if setting.spread is not None:
        return setting.spread.hardware
    devices = resolve_devices(setting.device)
    # Libraries compute on the first.
    return device_title(devices if setting.recipe.quantization.engine == "stream" else devices[:1])


def _error(error: Error) -> dict[str, float | int | None]:
    """Signal to noise of the rows that were compared on the way, dB, and how many of their elements were clipped."""
    return {"sqnr_db": error.sqnr_db, "clipped": error.clipped, "compared": error.count}


def needs_ranges(quantization: Quantization) -> bool:
    """Whether anything in the checkpoint is scaled by a range that we measure; libraries measure their own."""
    from pipeline.base.schemes import scheme

    if quantization.engine != "stream":
        return False
    names = {quantization.scheme, *(override.scheme for override in quantization.overrides)}
    return quantization.kv_cache == "fp8" or any(scheme(name).needs_ranges for name in names)


def _ranges(job: Job, choice: Choice) -> Mapping[str, torch.Tensor]:
    from calibration.ranges import load_ranges

    if "calibrate" not in job.inputs:
        return {}
    ranges = load_ranges(job.inputs["calibrate"].file(RANGES))
    return scale_ranges(ranges, choice, job.setting.recipe.quantization.format)
