"""source: turn a repository at a commit, or a folder, into a checked local snapshot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path

from quantmint.calibration.batches import hub_errors
from quantmint.calibration.encodings import OLD_MODELOPT
from quantmint.pipeline.base.argument import HUB_SCHEME, classify
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StageError, UserError, first_line
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.publish.release import CARD
from quantmint.pipeline.quantize.digest import MODEL_FILES, file_digests, folder_digest, model_files
from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint, read_json
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.models import Source as SourceSection
from quantmint.pipeline.recipe.modules import declared_quantization
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting, SourceIdentity
from quantmint.pipeline.stages.sizes import Prediction
from quantmint.pipeline.stages.stage import Job, Output, Stage, write_json
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.entries import Entry

LOCATION = "location.json"
CHECKPOINT = "checkpoint"
"""Folder of an entry of `quantize`."""
_TOKENIZER = re.compile(r"^(tokenizer|vocab|spiece|tekken)|\.(model|tiktoken)$")
_WEIGHTS, _SECOND_COPY = "*.safetensors", "consolidated*.safetensors"


class SourceStage(Stage):
    """Locate the 16-bit model without copying it: a folder where it lies, a repository in the Hub's cache."""

    family = "source"
    version = 1

    def is_planned(self, setting: Setting) -> bool:
        """Return True for every recipe."""
        return True

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the source's identity, by digest or by commit."""
        return setting.source.to_json()

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes of the download; empty for a local folder."""
        return {"download": size.source} if setting.source.folder is None else {}

    def seconds(self, estimate: Estimate) -> float:
        """Return the time of hashing the source; a download is not forecast."""
        return float(estimate.size.source / estimate.rates.hash)

    def run(self, job: Job) -> Output:
        """Download the model if need be, and check that tokenizer, configuration, index and shards agree.

        Raises `UserError` for a model without a tokenizer, `StageError` for a folder that changed since the run began.
        """
        identity = job.setting.source
        trust, digests = job.setting.recipe.trust_remote_code, dict[str, tuple[int, str]]()
        folder = identity.folder or fetch(identity, with_code=trust, progress=job.progress)
        try:
            require_tokenizer(folder)
        except UserError as error:
            if identity.marks is None:
                raise
            job.progress.warn(f"{error.message}; serving what is made of it needs one")
        if identity.marks is None:
            digests = file_digests(folder, job.setting.store.root)
            if identity.repo is None and folder_digest(digests) != identity.digest:
                raise StageError(f"{folder} changed since the run began.", hint="Run again.")
        checkpoint = open_checkpoint(folder)
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in digests.items()}
        write_json(job.path / LOCATION, {"folder": str(folder.resolve()), "files": files})
        return Output(
            result={"bytes": checkpoint.nbytes, "shards": len(checkpoint.shards), "identity": identity.to_json()},
            summary=f"{checkpoint.nbytes / 1e6:,.1f} MB in {len(checkpoint.shards)} file(s)",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Return whether the recorded files still exist with the same sizes, and the folder is still the recipe's."""
        location = read_json(entry.file(LOCATION))
        folder = Path(location["folder"])
        if setting.source.folder is not None and folder != setting.source.folder.resolve():
            return False
        paths = {folder / name: facts["size"] for name, facts in location["files"].items()}
        return folder.is_dir() and all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def require_tokenizer(folder: Path) -> None:
    """Raise `UserError` for a model without a tokenizer file, because no server could be asked anything."""
    if not any(_TOKENIZER.search(path.name) for path in folder.iterdir()):
        raise UserError(f"{folder} has no tokenizer: found no tokenizer.json, tokenizer.model, vocab.json or the like")


def repository(text: str) -> SourceSection | None:
    """Return the source section for ``org/name[@revision]`` on the Hub; None for any other text."""
    argument = classify(text)
    if argument.kind != "repository":
        return None
    return SourceSection(repo=argument.place.removeprefix(HUB_SCHEME), revision=argument.revision or "main")


def identify(source: SourceSection, folder: Path | None, store: Path, *, hashed: bool = True) -> SourceIdentity:
    """Return a source's identity: the digest of ``folder``, or the commit of its revision on the Hub.

    A revision that is a commit needs no network. Without ``hashed`` a folder is identified by its files' marks, enough
    where nothing is served. ``store`` is the store's root. Raises `UserError` where the Hub cannot resolve the
    revision.
    """
    marks = None if hashed else {} if folder is None else _marks(folder)
    if folder is not None:
        digest = folder_digest(file_digests(folder, store)) if marks is None else fingerprint(marks)
        return SourceIdentity(folder, digest, marks=marks)
    repo = str(source.repo)  # a recipe names the one or the other
    if source.pinned:
        return SourceIdentity(None, str(source.revision), repo, marks)
    from huggingface_hub import HfApi

    hint = (
        "Check the name and, for a gated model, `hf auth login`; without a network write the 40-digit commit as "
        "`revision`, or plan with --config FOLDER."
    )
    with _asking(UserError, f"{repo}@{source.revision}: cannot be resolved to a commit", hint):
        commit = HfApi().model_info(repo, revision=source.revision).sha
    return SourceIdentity(None, str(commit), repo, marks)


def _marks(folder: Path) -> dict[str, str]:
    """Return marks that change with the files, by name: size, times and inode of shards, SHA-256 of other files."""
    files: dict[str, str] = {}
    for path in model_files(folder):
        status, name = path.stat(), path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            times = f"{status.st_mtime_ns}, {status.st_ctime_ns}"
            files[name] = f"{status.st_size} bytes, {times}, inode {status.st_ino}"
        else:
            files[name] = sha256_of(path)
    return files


def config_folder(identity: SourceIdentity) -> Path:
    """Return the folder of the model's config.json, which is downloaded if need be, maybe without other files.

    Raises `UserError` where it cannot be downloaded.
    """
    if identity.folder is not None:
        return identity.folder
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    what = f"{identity.repo}@{identity.digest[:12]}: config.json cannot be fetched"
    with _asking(UserError, what, "Without a network, plan with --config FOLDER."):
        folder = Path(hf_hub_download(str(identity.repo), "config.json", revision=identity.digest)).parent
        if declared_quantization(read_json(folder / "config.json")) is None:
            with suppress(EntryNotFoundError):
                hf_hub_download(str(identity.repo), OLD_MODELOPT, revision=identity.digest)
        return folder


def model_folder(entry: Entry) -> Path:
    """Return the folder of the model that a `source` or `quantize` entry stands for."""
    if entry.stage == "source":
        return Path(read_json(entry.file(LOCATION))["folder"])
    return entry.path / CHECKPOINT


def read_source(job: Job) -> tuple[Checkpoint, Structure]:
    """Return the tensor headers of the job's 16-bit source, and the model's structure (its linear modules)."""
    checkpoint = open_checkpoint(model_folder(job.inputs["source"]))
    trust = job.setting.recipe.trust_remote_code
    return checkpoint, read_structure(checkpoint.folder, checkpoint.tensors, trust_remote_code=trust)


def fetch(identity: SourceIdentity, *, with_code: bool, progress: Progress) -> Path:
    """Download a repository's files at its commit where the Hub's cache lacks them, and return their folder.

    ``with_code`` includes Python files. Of the weights only the files that the index names are fetched: some
    repositories hold the model a second time, as consolidated.safetensors. Raises `StageError` where the download
    fails.
    """
    from huggingface_hub import constants, snapshot_download

    small = [pattern for pattern in MODEL_FILES if pattern != _WEIGHTS and (with_code or pattern != "*.py")]
    small.append(CARD)  # for what it states of the licence; it is no part of the model
    named = f"{identity.repo}@{identity.digest[:12]}"
    progress.say(f"fetching {named}")
    with _asking(StageError, f"{named}: the download failed", "What was fetched is kept: the same command goes on."):
        get = partial(
            snapshot_download,
            str(identity.repo),
            revision=identity.digest,
            local_files_only=constants.HF_HUB_OFFLINE,  # whether all shards are there is seen when they are opened
        )
        folder = Path(get(allow_patterns=small))
        shards = _indexed(folder)
        if shards is None:
            get(allow_patterns=[_WEIGHTS], ignore_patterns=[_SECOND_COPY])
        else:
            get(allow_patterns=[escape(name) for name in shards])
        return folder


def _indexed(folder: Path) -> list[str] | None:
    """Return the weight files that a folder's index names; None without an index, and for one that cannot be read."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        return sorted({str(name) for name in index["weight_map"].values()}) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def _asking(kind: type[StageError] | type[UserError], what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except hub_errors() as error:
        raise kind(f"{what}: {first_line(error)}", hint=hint, transient=is_transient(error)) from error
