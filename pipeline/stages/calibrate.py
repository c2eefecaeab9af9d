"""calibrate: the 16-bit model's ranges on a calibration set, for every scheme and format of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet, load_set
from pipeline.device import resolve_device
from pipeline.errors import StageError, UserError
from pipeline.recipe.schema import Calibration
from pipeline.stage import Job, Output, Setting, versions
from pipeline.stages.source import model_folder
from pipeline.store.disk import sha256_of
from pipeline.store.entries import Entry

RANGES = "ranges.safetensors"


@dataclass(frozen=True, slots=True)
class CalibrateStage:
    """Needs the whole model on one device."""

    key: str = "calibrate"
    family: str = "calibrate"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The model."""
        return {"source": "source"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The texts, how many, how long, how batched."""
        section = _section(setting)
        return {
            "set": _identity(load_set(section.set)),
            "samples": section.samples,
            "sequence_length": section.sequence_length,
            "batch_size": section.batch_size,
            "seed": section.seed,
            "trust_remote_code": setting.recipe.trust_remote_code,
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """PyTorch computes the ranges, transformers the model and the tokens."""
        return versions("torch", "transformers", "tokenizers")

    def run(self, job: Job) -> Output:
        """Run every batch through the resident model."""
        from transformers import AutoTokenizer

        from calibration.batches import batched, blocks_digest, token_blocks
        from calibration.observe import load_resident, observe
        from calibration.texts import read_texts

        section = _section(job.setting)
        folder = model_folder(job.inputs["source"])
        trust = job.setting.recipe.trust_remote_code
        try:
            job.progress.say("reading the calibration texts")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
            chosen = load_set(section.set)
            blocks = token_blocks(
                read_texts(chosen, tokenizer),
                tokenizer,
                samples=section.samples,
                sequence_length=section.sequence_length,
                seed=section.seed,
                special_tokens=chosen.text is not None,
            )
            device = resolve_device(job.setting.device)
            job.progress.say(f"loading the model on {device}")
            model = load_resident(folder, device, trust_remote_code=trust)
            with job.progress.bar(section.samples, "samples") as advance:
                ranges = observe(model, batched(blocks, section.batch_size), advance=advance)
        except CalibrationError as error:
            raise StageError(f"calibration: {error}") from error
        ranges.save(job.path / RANGES)
        tokens = int(blocks.numel())
        return Output(
            result={"tokens": tokens, "tokens_sha256": blocks_digest(blocks), "linear": len(ranges.inputs)},
            summary=f"{len(ranges.keys)} attention layers, {len(ranges.inputs)} linear inputs over {tokens:,} tokens",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


def _section(setting: Setting) -> Calibration:
    if setting.recipe.calibration is None:
        raise StageError("the recipe has no calibration section.")
    return setting.recipe.calibration


def _identity(chosen: CalibrationSet) -> Mapping[str, object]:
    """The set by its content: a local file by digest, a dataset by name and revision."""
    facts = asdict(chosen)
    try:
        facts["file"] = None if chosen.file is None else sha256_of(chosen.file)
    except OSError as error:
        raise UserError(f"{chosen.file}: the calibration texts cannot be read: {error.strerror}.") from None
    return {key: value for key, value in facts.items() if key not in ("name", "description")}
