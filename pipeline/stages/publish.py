"""publish: a checkpoint that passed, with the evidence, to where others find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eval import record
from eval.errors import MeasurementError
from eval.gate.changes import changes
from eval.verdict import Verdict
from pipeline.digest import file_digests, folder_digest
from pipeline.errors import StageError
from pipeline.publish.folder import publish_folder
from pipeline.publish.release import EVIDENCE as EVIDENCE
from pipeline.stage import Job, Output, Setting
from pipeline.stages.gate import GATE, checkpoint_digest
from pipeline.stages.quantize import CHECKPOINT
from pipeline.stages.report import PAGE
from pipeline.store.entries import Entry


@dataclass(frozen=True, slots=True)
class PublishStage:
    """The only stage whose effect lies outside the store."""

    key: str = "publish"
    family: str = "publish"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """What is published, and the proof."""
        return {"quantize": "quantize", "inspect": "inspect", "gate": "gate", "report": "report"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The target."""
        return {"folder": str(_target(setting)), "name": setting.recipe.name}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """None: bytes are copied."""
        return {}

    def run(self, job: Job) -> Output:
        """Judge once more from the record, compare digests, copy, switch."""
        setting = job.setting
        quantize, gate, report = (job.inputs[name] for name in ("quantize", "gate", "report"))
        _require_proof(quantize, gate)
        recipe = job.path / "recipe.yaml"
        recipe.write_text(setting.loaded.text_proven, encoding="utf-8")
        files = {
            **_files(quantize, f"{CHECKPOINT}/", ""),
            **_files(gate, "", f"{EVIDENCE}/"),
            **_files(report, "", f"{EVIDENCE}/"),
            **_files(job.inputs["inspect"], "", f"{EVIDENCE}/"),
            f"{EVIDENCE}/recipe.yaml": (recipe, _sha256(setting.loaded.text_proven)),
        }
        version = f"{gate.fingerprint[:8]}{report.fingerprint[:8]}"
        with job.progress.bar(sum(path.stat().st_size for path, _ in files.values()), "B") as advance:
            link = publish_folder(_target(setting), setting.recipe.name, version, files, advance=advance)
        digest = folder_digest(file_digests(link.resolve(), setting.store.root))
        if digest != checkpoint_digest(quantize):
            raise StageError(f"{link}: the published files are not those that were judged ({digest[:16]}…).")
        return Output(result={"version": version, "digest": digest}, summary=f"{link.name}, {digest[:16]}…")

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Whether the target still shows this release, with its files."""
        link = published_path(setting)
        release = str(entry.record.result["version"])
        return link.is_symlink() and link.resolve().name == release and (link / EVIDENCE / PAGE).is_file()


def published_path(setting: Setting) -> Path:
    """Where the recipe's checkpoint is found once it is published."""
    return _target(setting) / setting.recipe.name


def _target(setting: Setting) -> Path:
    return (setting.home / (setting.recipe.publish.folder or "published")).resolve()


def _require_proof(quantize: Entry, gate: Entry) -> None:
    """The verdict must be PASS when judged again from the record, over exactly these bytes."""
    try:
        recorded = record.read(gate.file(GATE))[1]
        report = record.rejudge(gate.file(GATE))
    except MeasurementError as error:
        raise StageError(f"the gate's record cannot be judged again: {error}") from error
    if report.verdict is not Verdict.PASS:
        raise StageError(f"the gate's record says {report.verdict.value}, only a PASS is published.")
    if report.artefact != checkpoint_digest(quantize):
        raise StageError("the gate judged another checkpoint than the one that would be published.")
    edited = changes(recorded, report)
    if edited:
        raise StageError(f"the gate's record is not what its numbers say. {edited[0]}")


def _files(entry: Entry, prefix: str, destination: str) -> dict[str, tuple[Path, str]]:
    return {
        destination + name.removeprefix(prefix): (entry.path / name, fact.sha256)
        for name, fact in entry.record.files.items()
        if name.startswith(prefix)
    }


def _sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode("utf-8")).hexdigest()
