"""package: everything of a release that is not there yet, made from what the other stages recorded.

The card, the scores that the Hub reads, the recipe, the bill of materials, the statement of how it was made, and last
the manifest with the digest of every file, which is the release's identity. No clock is asked and nothing of the
machine gets in, so that the same entries give the same release: what was published is found again, not sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eval.verdict import Verdict
from pipeline import __version__
from pipeline.base.errors import StageError, StoreError, UserError
from pipeline.base.progress import Progress
from pipeline.base.versions import versions
from pipeline.publish import manifest as manifests
from pipeline.publish.manifest import Manifest
from pipeline.publish.places import public_names
from pipeline.publish.provenance import Lineage
from pipeline.publish.release import (
    CARD,
    EVIDENCE,
    MANIFEST,
    NOTICE,
    PROVENANCE,
    RECIPE,
    SBOM,
    SIGNATURE,
    Release,
    tag_of,
)
from pipeline.stages.gate import checkpoint_digest
from pipeline.stages.lineage import gather
from pipeline.stages.quantize import CHECKPOINT
from pipeline.stages.report import ReportStage
from pipeline.stages.stage import Job, Output, Setting, Stage
from pipeline.store.entries import Entry
from pipeline.store.files import File

EVIDENT = ("gate", "report", "inspect")
"""Stages whose files go out as evidence."""


@dataclass(frozen=True, slots=True)
class PackageStage(Stage):
    """Runs after a PASS only; whether anything of it goes anywhere is the business of the stage `publish`."""

    key: str = "package"
    family: str = "package"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Everything that the report shows, and the report: all of it is in the manifest."""
        return {**ReportStage().inputs(setting), "report": "report"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The recipe, what the card says of where it goes, and what it is called where others read it."""
        from pipeline.stages import card

        return {
            "recipe": setting.loaded.text_proven,
            "card": card.settings(setting),
            "public": public_names(setting.recipe),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What writes the card and the documents."""
        return {**versions("jinja2", "huggingface_hub", "cyclonedx-python-lib"), "quantmint": __version__}

    def run(self, job: Job) -> Output:
        """Prove that nothing changed since the judgement, write what is missing, and look through all of it."""
        setting, entries = job.setting, job.inputs
        _require_unchanged(entries, job.progress)
        files = _given(entries["quantize"], {key: entries[key] for key in EVIDENT})
        title = _write_texts(job, files)
        lineage = gather(entries, setting.loaded.text_proven)
        made = {name: file for name, file in files.items() if not name.startswith(f"{EVIDENCE}/")}
        _write_statements(job.path, lineage, made, title, files)
        identity = manifests.write(job.path / MANIFEST, _manifest(lineage, title, files))
        files[MANIFEST] = _file(job.path / MANIFEST)
        _require_clean(files, setting, job.progress)
        tag = tag_of(datetime.fromisoformat(lineage.judged), identity)
        size = sum(file.size for file in files.values())
        return Output(
            result={"identity": identity, "tag": tag, "title": title, "size": size},
            summary=f"{tag}, {len(files)} files, {size / 1e6:,.1f} MB",
        )


def release(
    package: Entry, quantize: Entry, gate: Entry, report: Entry, inspect: Entry, sign: Entry | None = None
) -> Release:
    """Assemble a release from where its files lie in the store; none of them is read.

    Raises `StageError` where the manifest lists other files than are there.
    """
    files = _given(quantize, {"gate": gate, "report": report, "inspect": inspect})
    _add(files, _files(package))
    if sign is not None:
        _add(files, {SIGNATURE: _files(sign)[SIGNATURE]})
    if manifests.read(package.file(MANIFEST)).files != manifests.digests(files):
        raise StageError(
            f"{package.path / MANIFEST} lists other files than the store has.",
            hint="`quantmint run --redo package` puts the release together again.",
        )
    result = package.record.result
    return Release(
        name=manifests.read(package.file(MANIFEST)).name,
        tag=str(result["tag"]),
        identity=str(result["identity"]),
        title=str(result["title"]),
        files=dict(sorted(files.items())),
    )


def _require_unchanged(entries: Mapping[str, Entry], progress: Progress) -> None:
    """Every byte that is to go out, read once more: it must be what the gate judged, and a PASS."""
    quantize, gate = entries["quantize"], entries["gate"]
    if gate.record.result["verdict"] != Verdict.PASS.value:
        raise StageError(f"the gate's verdict is {gate.record.result['verdict']}, only a PASS is packaged.")
    if gate.record.result["artefact"] != checkpoint_digest(quantize):
        raise StageError("the gate judged another checkpoint than the one that would be packaged.")
    sources = {"quantize": quantize, **{key: entries[key] for key in EVIDENT}}
    total = sum(fact.size for entry in sources.values() for fact in entry.record.files.values())
    progress.say("reading what was judged once more")
    with progress.bar(total, "B") as advance:
        for key, entry in sources.items():
            try:
                entry.verify(advance=advance)
            except StoreError as error:
                raise StageError(
                    f"{error.message}: it is not what was judged, and nothing is packaged.",
                    hint=f"`quantmint run --redo {key}` makes it again.",
                ) from error


def _given(quantize: Entry, evidence: Mapping[str, Entry]) -> dict[str, File]:
    """The files that are there before the package: the checkpoint at the top, the evidence in its folder."""
    files = {
        name.removeprefix(f"{CHECKPOINT}/"): file
        for name, file in _files(quantize).items()
        if name.startswith(f"{CHECKPOINT}/")
    }
    for entry in evidence.values():
        _add(files, {f"{EVIDENCE}/{name}": file for name, file in _files(entry).items()})
    return files


def _files(entry: Entry) -> dict[str, File]:
    return {name: File(entry.path / name, fact.size, fact.sha256) for name, fact in entry.record.files.items()}


def _add(files: dict[str, File], more: Mapping[str, File]) -> None:
    twice = files.keys() & more.keys()
    if twice:
        raise StageError(f"two files of the release would be called {min(twice)}.")
    files.update(more)


def _file(path: Path) -> File:
    raw = path.read_bytes()
    return File(path, len(raw), hashlib.sha256(raw).hexdigest())


def _write(folder: Path, files: dict[str, File], name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    _add(files, {name: _file(path)})


def _write_texts(job: Job, files: dict[str, File]) -> str:
    """The card, the scores and the recipe; returns the release's title.

    Raises `UserError` where the source's licence does not let it go where others read it.
    """
    from pipeline.publish.card import eval_results, notice, render, sentence
    from pipeline.publish.licences import refusal
    from pipeline.stages import card

    facts = card.gather(job)
    public = public_names(job.setting.recipe)
    for name in public or (facts.name,):
        refused = refusal(facts.terms, name)
        if refused is not None and public:
            raise UserError(f"{name} must not be published: {refused}")
        if refused is not None:
            job.progress.warn(f"{name} may lie in a folder of yours, but must not be passed on: {refused}")
    _write(job.path, files, CARD, render(facts).encode())
    told = notice(facts)
    if told is not None:
        _write(job.path, files, NOTICE, told.encode())
    for name, text in eval_results(facts).items():
        _write(job.path, files, name, text.encode())
    _write(job.path, files, RECIPE, job.setting.loaded.text_proven.encode())
    return sentence(facts)


def _write_statements(
    folder: Path, lineage: Lineage, made: Mapping[str, File], title: str, files: dict[str, File]
) -> None:
    """The bill of materials of the checkpoint ``made``, and the statement over it and all other files."""
    from pipeline.publish.provenance import encode, sbom, statement

    _write(folder, files, SBOM, sbom(lineage, made, title, __version__))
    _write(folder, files, PROVENANCE, encode(statement(lineage, files, __version__)))


def _manifest(lineage: Lineage, title: str, files: Mapping[str, File]) -> Manifest:
    from pipeline.base.canonical import fingerprint

    return Manifest(
        name=lineage.name,
        title=title,
        created=lineage.judged,
        artefact=lineage.artefact,
        verdict="PASS",
        base=lineage.base,
        recipe=lineage.recipe,
        recipe_fingerprint=fingerprint(lineage.recipe),
        stages=lineage.stages,
        datasets=lineage.datasets,
        tools=lineage.tools,
        serving=lineage.serving,
        hardware=lineage.hardware,
        files=manifests.digests(files),
        quantmint=__version__,
    )


def _require_clean(files: Mapping[str, File], setting: Setting, progress: Progress) -> None:
    """Refuse names and contents that must not go out, and credentials in texts."""
    from pipeline.publish import allowed, secrets

    paths = {name: file.path for name, file in files.items()}
    refused = allowed.refused(files, with_code=setting.recipe.trust_remote_code) or allowed.misnamed(paths)
    if refused:
        raise StageError("what must not be published is among the files:\n" + "\n".join(refused))
    found = secrets.findings(paths)
    if found:
        raise StageError(
            "the files hold what looks like credentials, and nothing is published:\n" + "\n".join(map(str, found)),
            hint="Take them out of the recipe or the source, make them invalid where they were real, and run again.",
        )
    for place in secrets.private_paths(paths):
        progress.warn(f"{place}: it will be published")
