"""calibrate: the 16-bit model's ranges on a calibration set, for every scheme and format of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from calibration.errors import CalibrationError
from calibration.hub import at_commit
from calibration.sets import DEFAULTS, CalibrationSet, load_set
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
            "set": _identity(section),
            "samples": section.samples,
            "sequence_length": section.sequence_length,
            "packing": section.packing,
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

        from calibration.batches import batched, samples_digest
        from calibration.observe import load_resident, observe
        from calibration.samples import read_samples

        section = _section(job.setting)
        folder = model_folder(job.inputs["source"])
        trust = job.setting.recipe.trust_remote_code
        try:
            job.progress.say("reading the calibration texts")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
            samples = read_samples(
                pinned_set(section),
                tokenizer,
                samples=section.samples,
                sequence_length=section.sequence_length,
                packing=section.packing,
                seed=section.seed,
            )
            device = resolve_device(job.setting.device)
            job.progress.say(f"loading the model on {device}")
            model = load_resident(folder, device, trust_remote_code=trust)
            with job.progress.bar(section.samples, "samples") as advance:
                ranges = observe(model, batched(samples, section.batch_size), advance=advance)
        except CalibrationError as error:
            raise StageError(f"calibration: {error}") from error
        ranges.save(job.path / RANGES)
        tokens = sum(len(sample) for sample in samples)
        return Output(
            result={"tokens": tokens, "tokens_sha256": samples_digest(samples), "linear": len(ranges.inputs)},
            summary=f"{len(ranges.keys)} attention layers, {len(ranges.inputs)} linear inputs over {tokens:,} tokens",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


def _section(setting: Setting) -> Calibration:
    if setting.recipe.calibration is None:
        raise StageError("the recipe has no calibration section.")
    return setting.recipe.calibration


def pinned_set(section: Calibration) -> CalibrationSet:
    """The set that a recipe names, a dataset at a commit. Raises `UserError` where that cannot be known."""
    try:
        return at_commit(load_set(section.set))
    except CalibrationError as error:
        raise UserError(f"calibration set {section.set}: {error}.") from None


def _identity(section: Calibration) -> Mapping[str, object]:
    """The set by its content: a local file by digest, a dataset by name and commit.

    Where the Hub cannot be asked, by the branch: that can be planned, and is refused when it is to be run.
    """
    chosen = load_set(section.set)
    with suppress(CalibrationError):
        chosen = at_commit(chosen)
    facts = asdict(chosen)
    try:
        facts["file"] = None if chosen.file is None else sha256_of(chosen.file)
    except OSError as error:
        raise UserError(f"{chosen.file}: the calibration texts cannot be read: {error.strerror}.") from None
    return {key: value for key, value in facts.items() if key not in ("name", "description", *DEFAULTS)}
