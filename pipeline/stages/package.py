"""package and sign: put a release together from what the other stages recorded.

The card, the scores that the Hub reads, the recipe, the bill of materials, the provenance, and last the manifest with
the digest of every file, which is the release's identity. No clock is read and nothing of the machine gets in, so that
the same entries give the same release: a release that was published before is found, and not sent again.

A signature is a stage of its own, because two signatures over the same files differ: the first one is kept, and goes to
every destination.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from quantmint.eval import record
from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StageError, StoreError, UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish import screening
from quantmint.pipeline.publish.addresses import public_names
from quantmint.pipeline.publish.card import eval_results, notice_text, release_title, render
from quantmint.pipeline.publish.card_record import encode as encode_facts
from quantmint.pipeline.publish.licences import refusal
from quantmint.pipeline.publish.manifest import (
    DatasetRecord,
    HardwareRecord,
    Manifest,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.provenance import ABSENT, encode, sbom, statement
from quantmint.pipeline.publish.release import (
    CARD,
    CARD_FACTS,
    DRAFT,
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
from quantmint.pipeline.publish.signing import (
    check_private_key,
    expected_fingerprint,
    passphrase,
    require_identity,
    sign,
)
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.load import PROVEN_SUITE
from quantmint.pipeline.stages import card
from quantmint.pipeline.stages.calibrate import set_name, texts_of
from quantmint.pipeline.stages.draft import DRAFT_INSPECTION, DraftStage
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.gate import GATE, GateStage, checkpoint_digest
from quantmint.pipeline.stages.inspect import InspectStage
from quantmint.pipeline.stages.quantize import CHECKPOINT, checkpoint_files
from quantmint.pipeline.stages.report import ReportStage
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import LOCATION, model_folder
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.files import File
from quantmint.pipeline.store.toolchain import recorded_environment


class PackageStage(Stage):
    """Put a release together after a PASS: checkpoint, evidence, card, manifest; the stage `publish` sends it."""

    family = "package"
    version = 2
    releases = True

    def reads(self, stage: Stage) -> bool:
        """Return True for every stage: all stages of the run are in the manifest."""
        return True

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs for the card, the bill of materials and the search for credentials."""
        return tuple(("publish", name) for name in ("jinja2", "detect_secrets", "cyclonedx"))

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of hashing the checkpoint once more."""
        return _read_again(estimate)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the resolved recipe, the card's own settings, and the public names of the release."""
        return {
            "recipe": setting.loaded.text_proven,
            "card": card.settings(setting),
            "public": public_names(setting.recipe),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the libraries that write the card and the documents, and of quantmint."""
        return {**versions("jinja2", "huggingface_hub", "cyclonedx-python-lib"), "quantmint": __version__}

    def run(self, job: Job) -> Output:
        """Verify the files that were judged, write the release's other files, and screen all of them.

        Raises `StageError` where a file changed since the verdict or seems to hold credentials, `UserError` where the
        licence forbids publishing.
        """
        setting, entries = job.setting, job.inputs
        _require_unchanged(entries, job.progress)
        files = _evidence_files(entries["quantize"], _evidence(entries))
        title = _write_texts(job, files)
        manifest = manifest_of(entries, setting.loaded.text_proven, title)
        recorded = {key: recorded_environment(entry) for key, entry in sorted(entries.items())}
        environments = {key: environment for key, environment in recorded.items() if environment is not None}
        checkpoint = {name: file for name, file in files.items() if not name.startswith(f"{EVIDENCE}/")}
        _write(job.path, files, SBOM, sbom(manifest, environments, checkpoint))
        _write(job.path, files, PROVENANCE, encode(statement(manifest, files)))
        manifest = replace(manifest, files=manifests.digests(files))
        _write(job.path, files, MANIFEST, manifests.encode(manifest))
        identity = files[MANIFEST].sha256
        _require_clean(files, setting)
        tag = tag_of(datetime.fromisoformat(manifest.created), identity)
        size = sum(file.size for file in files.values())
        return Output(
            result={"identity": identity, "tag": tag, "title": title, "size": size},
            summary=f"{tag}, {len(files)} files, {size / 1e6:,.1f} MB",
        )


class SignStage(Stage):
    """Sign the release where the recipe asks for it; the signature is the entry's file `model.sig`."""

    family = "sign"
    version = 1
    needs = ("package", "quantize")
    packages = ("model-signing",)
    releases = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe asks for a signature."""
        return super().is_planned(setting) and setting.recipe.publish.sign is not None

    def reads(self, stage: Stage) -> bool:
        """Return whether the files of ``stage`` are part of the release."""
        return stage.evidence

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of the libraries that sign."""
        return tuple(("publish", name) for name in ("model_signing", "OpenSSL", "sigstore"))

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_signer`."""
        return (require_signer,)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of hashing the checkpoint once more."""
        return _read_again(estimate)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the signer: "keyless", or the fingerprint of the public key file, which needs no passphrase."""
        key = setting.loaded.signing_key
        return {"signer": "keyless" if key is None else {"key_sha256": expected_fingerprint(key)}}

    def run(self, job: Job) -> Output:
        """Read every file once more, sign it, and compare it with what was judged and packaged.

        Raises `StageError` and removes the signature where a file differs.
        """
        signing = release(job.inputs)
        paths = {name: file.path for name, file in signing.files.items()}
        key, word = job.setting.loaded.signing_key, passphrase()
        if key is not None:
            check_private_key(key, word)
        signature = job.path / SIGNATURE
        with disk_errors(job.path), job.progress.bar(signing.size, "B") as advance:
            signed = sign(signing.name, paths, signature, key=key, passphrase=word, advance=advance)
        changed = sorted(name for name, file in signing.files.items() if signed.digests.get(name) != file.sha256)
        if changed:
            signature.unlink()
            maker = next(key for key, entry in job.inputs.items() if paths[changed[0]].is_relative_to(entry.path))
            raise StageError(
                f"{paths[changed[0]]} changed since it was judged and packaged"
                f"{f', and {len(changed) - 1} more files' if changed[1:] else ''}: nothing is signed.",
                hint=f"`quantmint run --redo {maker}` makes it again.",
            )
        return Output(
            result={"signer": signed.signer.to_json(), "identity": signing.identity},
            summary=f"{len(signed.digests)} files, by {signed.signer}",
        )


def require_signer(setting: Setting) -> None:
    """Raise `UserError` or `StageError` where no release could be signed, for lack of a key, passphrase or identity."""
    key = setting.loaded.signing_key
    if key is None:
        require_identity()
    else:
        check_private_key(key, passphrase())


def release(entries: Mapping[str, Entry]) -> Release:
    """Assemble a release from the entries of a run's stages, without reading a checkpoint file.

    A signature is part of it where ``entries`` has one. Raises `StageError` where the manifest lists other files than
    there are.
    """
    package = entries["package"]
    files = _evidence_files(entries["quantize"], _evidence(entries))
    _add(files, _files(package))
    if "sign" in entries:
        _add(files, {SIGNATURE: _files(entries["sign"])[SIGNATURE]})
    manifest = manifests.read(package.file(MANIFEST))
    if manifest.files != manifests.digests(files):
        raise StageError(
            f"{package.path / MANIFEST} lists other files than the store has.",
            hint="`quantmint run --redo package` puts the release together again.",
        )
    result = package.record.result
    return Release(
        name=manifest.name,
        tag=str(result["tag"]),
        identity=str(result["identity"]),
        title=str(result["title"]),
        files=dict(sorted(files.items())),
    )


def _evidence(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of gate, report and inspection, and of a draft, whose files are part of a release, by key."""
    stages = (GateStage(), ReportStage(), InspectStage(), DraftStage())
    return {stage.key: entries[stage.key] for stage in stages if stage.evidence and stage.key in entries}


def _read_again(estimate: Estimate) -> float:
    return float(1.0 + estimate.size.checkpoint / estimate.rates.hash)


def _require_unchanged(entries: Mapping[str, Entry], progress: Progress) -> None:
    """Verify the bytes of the checkpoint and the evidence, and that the gate judged this checkpoint with a PASS.

    Raises `StageError` otherwise.
    """
    quantize, gate = entries["quantize"], entries["gate"]
    if gate.record.result["verdict"] != Verdict.PASS.value:
        raise StageError(f"the gate's verdict is {gate.record.result['verdict']}, only a PASS is packaged.")
    if gate.record.result["artefact"] != checkpoint_digest(quantize):
        raise StageError("the gate judged another checkpoint than the one that would be packaged.")
    sources = {"quantize": entries["quantize"], **_evidence(entries)}
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


def _evidence_files(quantize: Entry, evidence: Mapping[str, Entry]) -> dict[str, File]:
    """Return the release's files before packaging, by name: the checkpoint at the top, the rest in folders."""
    folder = quantize.path / CHECKPOINT
    checkpoint = checkpoint_files(quantize).items()
    files = {name: File(folder / name, fact.size, fact.sha256) for name, fact in checkpoint}
    if (draft := evidence.get("draft")) is not None:
        named = {name.removeprefix(f"{CHECKPOINT}/"): file for name, file in _files(draft).items()}
        _add(files, {f"{DRAFT}/{name}": file for name, file in named.items() if name != DRAFT_INSPECTION})
    for key, entry in evidence.items():
        if key == "draft":
            continue
        _add(files, {f"{EVIDENCE}/{name}": file for name, file in _files(entry).items()})
    return files


def _files(entry: Entry) -> dict[str, File]:
    return {name: File(entry.path / name, fact.size, fact.sha256) for name, fact in entry.record.files.items()}


def _add(files: dict[str, File], added: Mapping[str, File]) -> None:
    twice = files.keys() & added.keys()
    if twice:
        raise StageError(f"two files of the release would be called {min(twice)}.")
    files.update(added)


def _write(folder: Path, files: dict[str, File], name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    _add(files, {name: File(path, len(content), hashlib.sha256(content).hexdigest())})


def _write_texts(job: Job, files: dict[str, File]) -> str:
    """Write card, notice, scores, recipe and a suite of the recipe's own; add them to ``files`` and return the title.

    Raises `UserError` where the licence forbids publishing under a public name; without one it is a warning.
    """
    facts = card.gather(job)
    public = public_names(job.setting.recipe)
    for name in public or (facts.name,):
        refused = refusal(facts.terms, name)
        if refused is not None and public:
            raise UserError(f"{name} must not be published: {refused}")
        if refused is not None:
            job.progress.warn(f"{name} may lie in a folder of yours, but must not be passed on: {refused}")
    texts = {
        CARD: render(facts),
        NOTICE: notice_text(facts),
        **eval_results(facts),
        RECIPE: job.setting.loaded.text_proven,
    }
    for name, text in texts.items():
        if text is not None:
            _write(job.path, files, name, text.encode())
    texts_of_licence = card.texts_beside(model_folder(job.inputs["quantize"]))
    _write(job.path, files, CARD_FACTS, encode_facts(facts, job.setting.recipe.publish.licence, texts_of_licence))
    suite = job.setting.suite
    if suite.own_tasks == suite.path.parent:  # its own: nobody else has it
        task_files = {path for task in suite.tasks for path in suite.files(task)}
        for path in sorted({suite.path, *task_files}):
            _write(job.path, files, f"{PROVEN_SUITE}/{path.relative_to(suite.own_tasks)}", path.read_bytes())
    return release_title(facts)


def _require_clean(files: Mapping[str, File], setting: Setting) -> None:
    paths = {name: file.path for name, file in files.items()}
    refused = screening.refused_names(files, with_code=setting.recipe.trust_remote_code) or screening.misnamed_files(
        paths
    )
    if refused:
        raise StageError("what must not be published is among the files:\n" + "\n".join(refused))
    secrets = screening.find_secrets(paths)
    if secrets:
        raise StageError(
            "the files hold what looks like credentials, and nothing is published:\n" + "\n".join(map(str, secrets)),
            hint="Take them out of the recipe or the source, make them invalid where they were real, and run again.",
        )


def manifest_of(entries: Mapping[str, Entry], recipe: str, title: str) -> Manifest:
    """Return a checkpoint's manifest from a run's entries, still without files.

    ``recipe`` is `LoadedRecipe.text_proven`, ``title`` the release's title.
    """
    resolved = yaml.safe_load(recipe)
    server = record.read(entries["gate"].file(GATE))[0].candidate
    stages = {key: _stage_record(entry) for key, entry in sorted(entries.items())}
    calibrated: list[DatasetRecord] = []
    if (texts := texts_of(entries)) is not None:
        name = texts["repo"] or set_name(resolved["calibration"]["set"])
        calibrated.append(DatasetRecord("calibration", name, texts["revision"], texts["file"]))
    return Manifest(
        name=str(resolved["name"]),
        title=title,
        created=stages["gate"].finished,
        artefact=str(entries["gate"].record.result["artefact"]),
        verdict="PASS",
        base=_base(entries["source"]),
        recipe=resolved,
        recipe_fingerprint=fingerprint(resolved),
        stages=stages,
        datasets=tuple(dict.fromkeys((*calibrated, *_evaluated(entries)))),
        tools=_tools(entries),
        serving=ServingRecord(engine=server.engine, image=server.image),
        hardware=HardwareRecord(
            quantized_on=_text(entries["quantize"].record.result.get("hardware")),
            measured_on=server.device,
            target=str(resolved["target"]["hardware"]),
        ),
        files={},
        quantmint=__version__,
    )


def _stage_record(entry: Entry) -> StageRecord:
    record_ = entry.record
    return StageRecord(
        fingerprint=entry.fingerprint,
        version=int(str(record_.payload["version"])),
        started=record_.started,
        finished=record_.finished,
        tools=record_.tools,
        payload=record_.payload,
    )


def _base(source: Entry) -> SourceRecord:
    """Return the source's identity for the manifest: repository and commit or digest, and the SHA-256 of each file."""
    named = _settings(source)
    files = read_json(source.file(LOCATION))["files"]
    return SourceRecord(
        repo=_text(named.get("repo")),
        commit=_text(named.get("commit")),
        sha256=_text(named.get("sha256")),
        files={name: facts["sha256"] for name, facts in sorted(files.items())},
    )


def _settings(entry: Entry) -> Any:
    return entry.record.payload["settings"]


def _evaluated(entries: Mapping[str, Entry]) -> Iterator[DatasetRecord]:
    """Yield the evaluation's data: data sets at the fetched commits, local files by digest, the canary's prompts."""
    for key in ("evaluate-baseline", "evaluate-candidate"):
        if key not in entries:
            continue
        for task in _settings(entries[key])["tasks"]:
            if task["files"]:
                data = {name: digest for name, digest in task["files"].items() if not name.endswith(".yaml")}
                revision = next(iter(data.values())) if len(data) == 1 else fingerprint(task["files"])
                yield DatasetRecord("evaluation", task["task"], None, revision)
        fetched: Any = entries[key].record.result["datasets"]
        for _, datasets in sorted(fetched.items()):
            for dataset in datasets:
                yield DatasetRecord("evaluation", dataset["path"], dataset["commit"], None)
    named = {"canary": "canary prompts", "kl": "kl prompts", "acceptance": "speculative decoding's prompts"}
    for key, name in named.items():
        if (entry := entries.get(f"{key}-baseline")) is not None:
            yield DatasetRecord("evaluation", name, None, _settings(entry)["prompts"])


def _tools(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the versions of all stages by tool; where stages used different ones, they are joined by commas."""
    by_tool: dict[str, set[str]] = {}
    for entry in entries.values():
        for name, version in entry.record.tools.items():
            if version != ABSENT:
                by_tool.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(by_tool.items())}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
