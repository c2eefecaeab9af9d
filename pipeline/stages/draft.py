"""draft: quantize the model that proposes tokens for speculative decoding, and prove it as a checkpoint is proven.

The stage reads nothing of the target, so that its fingerprint, and with it the draft's place in the store, follows from
the recipe alone: `launch_plan` names the draft wherever a side is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from quantmint.eval.measurements import Side
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import InspectionError, UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.quantize.digest import file_digests, folder_digest
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.draft import read_draft
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.models import Draft
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import CHECKPOINT
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage, write_json

DRAFT_INSPECTION: Final = "inspection.json"
_MANIFEST = "manifest.jsonl"


class DraftStage(Stage):
    """Quantize the recipe's draft to the nearest, and inspect it beside its source; an unsound one is an error."""

    family = "draft"
    version = 1
    evidence = True
    by_content = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe has a draft."""
        return super().is_planned(setting) and setting.recipe.draft is not None

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the digest of the draft's files, its scheme and exclusions, and the layout."""
        section = _section(setting).model_dump(mode="json")
        return {**section, "folder": draft_digest(setting), "format": setting.recipe.quantization.format}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the version of torch."""
        return versions("torch")

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return a check that the draft can be read and takes its scheme."""
        return (_require_draft,)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of a small model, a constant."""
        return 5.0

    def run(self, job: Job) -> Output:
        """Write the quantized draft and its inspection. Raises `InspectionError` for an unsound one."""
        source, structure = read_draft(_folder(job.setting))
        quantization = _quantization(job.setting)
        choice = select(structure, quantization)
        plans = plan_shards(source, structure, choice, quantization.format)
        folder = job.path / CHECKPOINT
        with job.progress.bar(sum(plan.read_bytes for plan in plans), "B") as advance:
            written = write_checkpoint(
                CheckpointPlan(source, plans, choice, {}, checkpoint_format=quantization.format),
                folder,
                manifest=job.path / _MANIFEST,
                advance=advance,
            )
        (job.path / _MANIFEST).unlink()
        inspection = inspect_checkpoint(open_checkpoint(folder), structure, source=source)
        write_json(job.path / DRAFT_INSPECTION, inspection.to_json())
        if not inspection.passed:
            raise InspectionError(f"the quantized draft is unsound and is not served:\n{inspection.summary()}")
        size = sum(shard.size for shard in written.shards)
        return Output(
            result={"bytes": size, "modules": len(choice.schemes), "scheme": quantization.scheme},
            summary=f"{size / 1e6:,.1f} MB from {source.nbytes / 1e6:,.1f} MB; {inspection.summary()}",
            known={f"{CHECKPOINT}/{shard.name}": (shard.size, shard.sha256) for shard in written.shards},
        )


def draft_digest(setting: Setting) -> str:
    """Return the digest of the files of the draft in 16 bit. Raises `UserError` for a folder without a model."""
    return folder_digest(file_digests(_folder(setting), setting.store.root))


def draft_model(setting: Setting, side: Side) -> Path:
    """Return the folder of the draft that a side is served with: the recipe's own, or the quantized one in the store.

    The latter is where the stage will have put it, whether it has run or not.
    """
    if side == "baseline":
        return _folder(setting)
    stage = DraftStage()
    payload = {
        "stage": stage.family,
        "version": stage.version,
        "inputs": {},
        "settings": dict(stage.settings(setting)),
        "tools": dict(stage.tools(setting)),
    }
    return setting.store.entry_path(stage.family, fingerprint(payload)).resolve() / CHECKPOINT


def _section(setting: Setting) -> Draft:
    section = setting.recipe.draft
    assert section is not None  # noqa: S101 - else there is no such stage
    return section


def _folder(setting: Setting) -> Path:
    folder = setting.loaded.draft_folder
    assert folder is not None  # noqa: S101 - else there is no such stage
    return folder


def _quantization(setting: Setting) -> Quantization:
    """Return the quantization of the draft: to the nearest, in the layout of its target."""
    section = _section(setting)
    return Quantization(scheme=section.scheme, format=setting.recipe.quantization.format, exclude=section.exclude)


def _require_draft(setting: Setting) -> None:
    """Raise `UserError`, which names the recipe's field, for a draft that cannot be read or takes no such scheme."""
    try:
        source, structure = read_draft(_folder(setting))
        quantization = _quantization(setting)
        plan_shards(source, structure, select(structure, quantization), quantization.format)
    except UserError as error:
        place = setting.loaded.place("draft", "folder")
        message = error.message.replace("quantization.", "draft.")
        raise UserError(f"{place}: draft: {message}", hint=error.hint) from None
