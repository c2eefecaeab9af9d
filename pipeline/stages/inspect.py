"""inspect: structural proof of the checkpoint that was just written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.quantize.engines.stream.engine import scale_ranges
from pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from pipeline.quantize.inspection.findings import INSPECTION as INSPECTION
from pipeline.quantize.inspection.inspect import inspect_checkpoint
from pipeline.quantize.model.structure import Structure, read_structure, select
from pipeline.recipe.schema import Quantization
from pipeline.stages.calibrate import RANGES
from pipeline.stages.quantize import needs_ranges
from pipeline.stages.source import model_folder
from pipeline.stages.stage import Job, Output, Setting, Stage, write_json
from pipeline.store.entries import Entry


@dataclass(frozen=True, slots=True)
class InspectStage(Stage):
    """Its result is kept whether it passes or not: the same bytes would be found wrong again."""

    key: str = "inspect"
    family: str = "inspect"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The checkpoint, what it was made from, and the ranges where there are any."""
        calibrated = {"calibrate": "calibrate"} if needs_ranges(setting.recipe.quantization) else {}
        return {"quantize": "quantize", "source": "source", **calibrated}

    def run(self, job: Job) -> Output:
        """Check the headers, the numbers and the untouched tensors."""
        trust = job.setting.recipe.trust_remote_code
        source = open_checkpoint(model_folder(job.inputs["source"]))
        checkpoint = open_checkpoint(model_folder(job.inputs["quantize"]))
        structure = read_structure(source.folder, source.tensors, trust_remote_code=trust)
        tensor_bytes = job.inputs["quantize"].record.result["tensor_bytes"]
        quantization = job.setting.recipe.quantization
        calibrated = "calibrate" in job.inputs
        expected = _expected_scales(job, checkpoint, structure, quantization) if calibrated else None
        with job.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(
                checkpoint,
                structure,
                source=source,
                expected_scales=expected,
                expected_bytes=tensor_bytes if isinstance(tensor_bytes, int) else None,
                advance=advance,
            )
        write_json(job.path / INSPECTION, inspection.to_json())
        return Output(
            result={
                "verdict": "PASS" if inspection.passed else "FAIL",
                "reasons": [] if inspection.passed else inspection.summary().splitlines(),
            },
            summary=inspection.summary() if inspection.passed else f"{len(inspection.findings)} findings",
        )


def reasons_of(entry: Entry) -> tuple[str, ...]:
    """What an inspection found wrong, a line each; empty for a sound checkpoint."""
    reasons = entry.record.result.get("reasons")
    return tuple(str(reason) for reason in reasons) if isinstance(reasons, list) else ()


def _expected_scales(
    job: Job, checkpoint: Checkpoint, structure: Structure, quantization: Quantization
) -> Mapping[str, tuple[float, ...]]:
    """The static scales that the ranges give, by tensor name, rounded to what they are stored in."""
    import torch

    from calibration.ranges import load_ranges
    from pipeline.quantize.engines.stream.kernels import fp8_scale

    ranges = load_ranges(job.inputs["calibrate"].file(RANGES))
    wanted = scale_ranges(ranges, select(structure, quantization), quantization.format)
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    stored = {name: checkpoint.tensors[name][1].dtype for name in wanted if name in checkpoint.tensors}
    return {
        name: tuple(fp8_scale(wanted[name].to(dtypes[dtype])).float().tolist())
        for name, dtype in stored.items()
        if dtype in dtypes
    }
