"""inspect: prove a checkpoint's structure and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantmint.calibration.lazy import torch
from quantmint.calibration.ranges import load_ranges
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import InspectionError
from quantmint.pipeline.quantize.device import resolve_devices
from quantmint.pipeline.quantize.engines.stream.engine import scale_ranges, static_scale
from quantmint.pipeline.quantize.engines.stream.plan import NUMBERS, origin_of
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint, read_json, torch_dtype
from quantmint.pipeline.quantize.inspection.findings import INSPECTION as INSPECTION
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.stages.calibrate import RANGES, needs_ranges
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.quantize import CHANGED, ERRORS
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder, read_source
from quantmint.pipeline.stages.stage import Job, Output, Stage, write_json
from quantmint.pipeline.store.entries import Entry


class InspectStage(Stage):
    """Check a checkpoint's structure and numbers.

    The entry is kept for an unsound checkpoint too, because the same bytes would fail again; such a checkpoint is an
    error and is never served.
    """

    family = "inspect"
    version = 1
    evidence = True

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of hashing the checkpoint for our engine, else of reading the source."""
        if "quantize" in estimate.weights:
            return float(estimate.size.checkpoint / estimate.rates.hash)
        return float(estimate.size.source / estimate.rates.load)

    def require_sound(self, entry: Entry) -> None:
        """Raise `InspectionError` with the reasons where the checkpoint is unsound."""
        if entry.record.result["verdict"] != Verdict.PASS.value:
            raise InspectionError(
                "\n".join(("the checkpoint is unsound and is neither served nor published:", *reasons_of(entry))),
                hint=f"All findings: {entry.path / INSPECTION}",
            )

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage keys of `quantize`, `source` and, where scales are static, of `calibrate`."""
        calibrated = {"calibrate": "calibrate"} if needs_ranges(setting.recipe.quantization) else {}
        return {"quantize": "quantize", "source": "source", **calibrated}

    def run(self, job: Job) -> Output:
        """Check the checkpoint's headers, numbers and unquantized tensors against source and configuration.

        Record the findings.
        """
        source, structure = read_source(job)
        checkpoint = open_checkpoint(model_folder(job.inputs["quantize"]))
        tensor_bytes = job.inputs["quantize"].record.result["tensor_bytes"]
        calibrated = "calibrate" in job.inputs
        scales = _expected_scales(job, checkpoint, source, structure) if calibrated else {}
        errors = _stored_errors(job.inputs["quantize"])
        proven = None if errors is None else _proven(errors)
        with job.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(
                checkpoint,
                structure,
                source=source,
                expected=Expectations(
                    scales,
                    tensor_bytes if isinstance(tensor_bytes, int) else None,
                    proven,
                    _output_errors(errors or {}),
                ),
                # What is proven is a few rows of each tensor; a GPU would take longer to wake up.
                device="cpu" if proven is not None else resolve_devices(job.setting.device)[0],
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


def _stored_errors(entry: Entry) -> Mapping[str, Any] | None:
    """Return the errors by module that our engine measured while writing; None for a library's checkpoint."""
    path = entry.path / ERRORS
    errors: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return errors


def _proven(errors: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the SQNR in dB of each module, infinite without an error."""
    decibels = {module: error["sqnr_db"] for module, error in errors.items()}
    return {module: math.inf if sqnr is None else sqnr for module, sqnr in decibels.items()}  # there was no noise


def _output_errors(errors: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the SQNR in dB of the outputs of each compensated module; see `Gain.output_db`."""
    return {module: error["output_db"] for module, error in errors.items() if "output_db" in error}


def reasons_of(entry: Entry) -> tuple[str, ...]:
    """Return the findings of an inspect entry, one line each; empty for a sound checkpoint."""
    reasons = entry.record.result.get("reasons")
    return tuple(str(reason) for reason in reasons) if isinstance(reasons, list) else ()


def _expected_scales(
    job: Job, checkpoint: Checkpoint, source: Checkpoint, structure: Structure
) -> Mapping[str, tuple[float, ...]]:
    """Return the static scales that follow from the measured ranges, by tensor name, rounded to their stored dtype."""
    quantization = job.setting.recipe.quantization
    ranges = load_ranges(job.inputs["calibrate"].file(RANGES))
    measured = scale_ranges(ranges, select(structure, quantization), quantization.format)
    changed = job.inputs["quantize"].path / CHANGED
    if changed.is_file():
        measured |= {name: torch.tensor([largest]) for name, largest in read_json(changed).items()}
    scales: dict[str, tuple[float, ...]] = {}
    for name, largest in measured.items():
        stored = checkpoint.tensors[name][1].dtype if name in checkpoint.tensors else None
        if stored not in NUMBERS:
            continue
        module, _, role = name.rpartition(".")
        model = origin_of(source, structure.weights[module]).dtype if module in structure.weights else stored
        scale = static_scale(role, largest, torch_dtype(stored), torch_dtype(model))
        scales[name] = tuple(scale.float().reshape(-1).tolist())
    return scales
