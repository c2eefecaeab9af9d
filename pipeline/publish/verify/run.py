"""All checks of a release; a failed check does not prevent the next."""

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
    ExpectedName,
    ReleaseCheck,
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
    expected: ExpectedName | None = None,
    relaunch: Relaunch | None = None,
    source: Path | None = None,
) -> tuple[ReleaseCheck, ...]:
    """Check the release in ``folder``; nothing is written, none of its code is run, none of its pages is opened.

    ``tag`` and ``expected`` tell which release should be there. ``relaunch`` plans the serving commands of its card;
    None leaves them unchecked. ``source`` is the folder of the model that the checkpoint was made from (None: the
    checkpoint is inspected by itself). Raises `UserError` when the folder has no release.
    """
    root = folder.resolve()
    content = listing(root)
    if MANIFEST not in content.files:
        raise UserError(
            f"{folder}: found no {MANIFEST}, so this is no release of quantmint",
            hint="`quantmint inspect` proves any checkpoint's structure.",
        )
    steps: dict[str, Callable[[ReleaseUnderTest], ReleaseCheck]] = {
        "manifest": files.check_manifest,
        "files": files.check_files,
        "digests": files.check_digests,
        "signature": partial(files.check_signature, trust=trust),
        "provenance": files.check_provenance,
        "recipe": checkpoint.check_recipe,
        "structure": partial(checkpoint.check_structure, source=source),
        "gate": checkpoint.check_gate,
        "report": documents.check_report,
        "card": partial(documents.check_card, relaunch=relaunch),
    }
    try:
        manifest = manifests.read(root / MANIFEST)
    except manifests.ManifestError as error:
        unreadable = failure("manifest", error.message.replace(f"{root}/", ""))
        return (unreadable, *(not_checked(name, f"{MANIFEST} cannot be read") for name in list(steps)[1:]))
    progress.say("hashing every file, then inspecting the tensors")
    try:
        with progress.bar(sum(content.files.values()), "B") as advance:
            digests = hash_files({name: root / name for name in content.files}, advance)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    subject = ReleaseUnderTest(root, content, digests, manifest, progress, tag, expected)
    return tuple(_run_check(name, check, subject) for name, check in steps.items())


def _run_check(name: str, check: Callable[[ReleaseUnderTest], ReleaseCheck], subject: ReleaseUnderTest) -> ReleaseCheck:
    """Run a check and return its result; an exception is a result too, because untrusted files may break any reader."""
    try:
        return check(subject)
    except ModuleNotFoundError as error:
        return not_checked(name, f"this needs {error.name}, which is not installed", "pip install 'quantmint[all]'")
    except QuantmintError as error:
        return failure(name, error.message.replace(f"{subject.folder}/", ""))
    except Exception as error:  # untrusted files: any exception is reported with its check
        return ReleaseCheck(name, CheckOutcome.FAILS, f"it cannot be read: {type(error).__name__}: {str(error)[:200]}")


def fetch_release(subject: str, progress: Progress) -> tuple[Path, str | None, ExpectedName | None]:
    """Fetch the release at an address: a folder, or DESTINATION or DESTINATION@TAG with a repository or a bucket.

    Returns the release's folder, the tag in the address, and the name that the release must have (None: any, in a
    folder that is no destination). Raises `UserError` for a destination that does not exist.
    """
    named = classify(subject)
    if named.kind == "folder" and named.revision is None:
        path = Path(subject)
        published = (path.absolute().parent / RELEASES / path.absolute().name).is_dir()
        return path, None, ExpectedName(path.absolute().name) if published else None
    place = open_destination(named.place)
    name = named.place.removeprefix(HUB_SCHEME).rstrip("/")
    expected = ExpectedName(name, True) if named.kind == "repository" else ExpectedName(name.rpartition("/")[2])
    return place.fetch(None, tag=named.revision, progress=progress), named.revision, expected


def fetch_evidence(subject: str, progress: Progress) -> Path | None:
    """Fetch the evidence of a release in a repository or bucket, without weights; None for other addresses."""
    named = classify(subject)
    if named.kind not in ("repository", "bucket"):
        return None

    def is_evidence(name: str) -> bool:
        return name == MANIFEST or name.startswith(f"{EVIDENCE}/")

    return (
        open_destination(named.place).fetch(None, tag=named.revision, progress=progress, select=is_evidence) / EVIDENCE
    )
