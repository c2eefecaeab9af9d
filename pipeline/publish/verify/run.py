"""All checks of a release, one after the other; what one finds keeps no other from being made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from quantmint.pipeline.base.argument import HUB_SCHEME, classify
from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.addresses import open_destination
from quantmint.pipeline.publish.release import EVIDENCE, MANIFEST
from quantmint.pipeline.publish.signing import hash_files
from quantmint.pipeline.publish.verify import checkpoint, documents, files
from quantmint.pipeline.publish.verify.documents import Relaunch
from quantmint.pipeline.publish.verify.files import Trust
from quantmint.pipeline.publish.verify.subject import (
    CheckOutcome,
    CheckResult,
    ExpectedName,
    ReleaseUnderTest,
    failure,
    listing,
    not_checked,
)
from quantmint.pipeline.recipe.destinations import RELEASES


def verify(
    folder: Path,
    trust: Trust,
    progress: Progress,
    *,
    tag: str | None = None,
    wanted: ExpectedName | None = None,
    relaunch: Relaunch | None = None,
) -> tuple[CheckResult, ...]:
    """Check a release that lies in ``folder``; nothing is written, no code of it is run, nothing of it is shown.

    ``tag`` and ``wanted`` say which release should be there. ``relaunch`` plans the launches that its card shows; None
    leaves them unchecked. Raises `UserError` where there is no release.
    """
    root = folder.resolve()
    there = listing(root)
    if MANIFEST not in there.files:
        raise UserError(
            f"{folder}: found no {MANIFEST}, so this is no release of quantmint",
            hint="`quantmint inspect` proves any checkpoint's structure.",
        )
    steps: dict[str, Callable[[ReleaseUnderTest], CheckResult]] = {
        "manifest": files.check_manifest,
        "files": files.check_files,
        "digests": files.check_digests,
        "signature": partial(files.check_signature, trust=trust),
        "provenance": files.check_provenance,
        "recipe": checkpoint.check_recipe,
        "structure": checkpoint.check_structure,
        "gate": checkpoint.check_gate,
        "report": documents.check_report,
        "card": partial(documents.check_card, relaunch=relaunch),
    }
    try:
        manifest = manifests.read(root / MANIFEST)
    except manifests.ManifestError as error:
        told = failure("manifest", error.message.replace(f"{root}/", ""))
        return (told, *(not_checked(name, f"{MANIFEST} cannot be read") for name in list(steps)[1:]))
    progress.say("hashing every file, then inspecting the tensors")
    try:
        with progress.bar(sum(there.files.values()), "B") as advance:
            found = hash_files({name: root / name for name in there.files}, advance)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    subject = ReleaseUnderTest(root, there, found, manifest, progress, tag, wanted)
    return tuple(_made(name, check, subject) for name, check in steps.items())


def _made(name: str, check: Callable[[ReleaseUnderTest], CheckResult], subject: ReleaseUnderTest) -> CheckResult:
    """A check, however it ends: what a stranger wrote may break any reader, and that is a finding too."""
    try:
        return check(subject)
    except ModuleNotFoundError as error:
        return not_checked(name, f"this needs {error.name}, which is not installed", "pip install 'quantmint[all]'")
    except QuantmintError as error:
        return failure(name, error.message.replace(f"{subject.folder}/", ""))
    except Exception as error:  # the files are anybody's: whatever they break is named with its check
        return CheckResult(name, CheckOutcome.FAILS, f"it cannot be read: {type(error).__name__}: {str(error)[:200]}")


# From what a person names to a folder with a release's files: one that lies here, or what was fetched.


def fetch_release(subject: str, progress: Progress) -> tuple[Path, str | None, ExpectedName | None]:
    """Fetch what a person named: a folder, or PLACE or PLACE@TAG of releases, which may be a repository or a bucket.

    Returns the release's folder, the tag that was asked for, and the place's own name, which the release must have
    (None: a folder that is no place of releases may have any). Raises `UserError` for a place that does not exist.
    """
    named = classify(subject)
    if named.kind == "folder" and named.revision is None:
        path = Path(subject)
        published = (path.absolute().parent / RELEASES / path.absolute().name).is_dir()
        return path, None, ExpectedName(path.absolute().name) if published else None
    place = open_destination(named.place)
    name = named.place.removeprefix(HUB_SCHEME).rstrip("/")
    wanted = ExpectedName(name, True) if named.kind == "repository" else ExpectedName(name.rpartition("/")[2])
    return place.fetch(None, tag=named.revision, progress=progress), named.revision, wanted


def fetch_evidence(subject: str, progress: Progress) -> Path | None:
    """The folder with the evidence of a release that lies elsewhere, fetched without its weights, or None."""
    named = classify(subject)
    if named.kind not in ("repository", "bucket"):
        return None

    def wanted(name: str) -> bool:
        return name == MANIFEST or name.startswith(f"{EVIDENCE}/")

    return open_destination(named.place).fetch(None, tag=named.revision, progress=progress, wanted=wanted) / EVIDENCE
