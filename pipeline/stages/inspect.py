"""inspect: structural proof of the checkpoint that was just written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.formats.checkpoint import open_checkpoint
from pipeline.formats.layout import layout_of
from pipeline.inspection.inspect import inspect_checkpoint
from pipeline.model.structure import read_structure
from pipeline.stage import Job, Output, Setting, write_json
from pipeline.stages.calibrate import RANGES
from pipeline.stages.source import model_folder
from pipeline.store.entries import Entry

INSPECTION = "inspection.json"


@dataclass(frozen=True, slots=True)
class InspectStage:
    """Its result is kept whether it passes or not: the same bytes would be found wrong again."""

    key: str = "inspect"
    family: str = "inspect"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The checkpoint, what it was made from, and the ranges where there are any."""
        calibrated = {"calibrate": "calibrate"} if setting.recipe.quantization.kv_cache == "fp8" else {}
        return {"quantize": "quantize", "source": "source", **calibrated}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """None: what is right does not depend on the recipe."""
        return {}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """None: what is found does not depend on who looks."""
        return {}

    def run(self, job: Job) -> Output:
        """Check the headers, the numbers and the untouched tensors."""
        trust = job.setting.recipe.trust_remote_code
        source = open_checkpoint(model_folder(job.inputs["source"]))
        checkpoint = open_checkpoint(model_folder(job.inputs["quantize"]))
        structure = read_structure(source.folder, source.tensors, trust_remote_code=trust)
        tensor_bytes = job.inputs["quantize"].record.result["tensor_bytes"]
        with job.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(
                checkpoint,
                structure,
                source=source,
                expected_kv=_expected_kv(job) if "calibrate" in job.inputs else None,
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

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


def reasons_of(entry: Entry) -> tuple[str, ...]:
    """What an inspection found wrong, a line each; empty for a sound checkpoint."""
    reasons = entry.record.result.get("reasons")
    return tuple(str(reason) for reason in reasons) if isinstance(reasons, list) else ()


def _expected_kv(job: Job) -> Mapping[str, float]:
    """The KV scales that the ranges give, by tensor name, rounded as they are stored."""
    import torch

    from calibration.ranges import load_ranges
    from pipeline.engines.stream.kernels import fp8_scale

    form = layout_of(open_checkpoint(model_folder(job.inputs["quantize"])).config)
    ranges = load_ranges(job.inputs["calibrate"].file(RANGES))
    source = open_checkpoint(model_folder(job.inputs["source"]))
    expected: dict[str, float] = {}
    for attention, keys in ranges.keys.items():
        stored = source.tensors[f"{attention}.k_proj.weight"][1].dtype
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[stored]
        pair = (keys.max(), ranges.values[attention].max())
        for name, amax in zip(form.kv_scale_names(attention), pair, strict=True):
            expected[name] = float(fp8_scale(amax.to(dtype)))
    return expected
