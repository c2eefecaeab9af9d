"""All checks of a release, one after the other; what one finds keeps no other from being made.

Of a repository of the Hub the weights need not be fetched, since the Hub tells the SHA-256 of each large file: a file
of the right size stands in for each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipeline.base.argument import classify
from pipeline.base.errors import QuantmintError, UserError
from pipeline.base.progress import Progress
from pipeline.publish import manifest as manifests
from pipeline.publish.place import Place
from pipeline.publish.places import open_place
from pipeline.publish.release import EVIDENCE, MANIFEST
from pipeline.publish.signing import hashed
from pipeline.publish.verify import checkpoint, files
from pipeline.publish.verify.files import Trust
from pipeline.publish.verify.subject import Check, Outcome, Subject, fails, listing, not_checked


def verify(
    folder: Path,
    trust: Trust,
    progress: Progress,
    *,
    vouched: Mapping[str, str] | None = None,
    tag: str | None = None,
) -> tuple[Check, ...]:
    """Check a release that lies in ``folder``; nothing is written, no code of it is run, nothing of it is shown.

    ``vouched`` are SHA-256 by name of files whose bytes were not fetched: in their place lie others of the right size.
    ``tag`` is that of the release which should be there. Raises `UserError` where there is no release.
    """
    root = folder.resolve()
    there = listing(root)
    if MANIFEST not in there.files:
        raise UserError(
            f"{folder}: found no {MANIFEST}, so this is no release of quantmint",
            hint="`quantmint inspect` proves any checkpoint's structure.",
        )
    steps: dict[str, Callable[[Subject], Check]] = {
        "manifest": files.check_manifest,
        "files": files.check_files,
        "digests": files.check_digests,
        "signature": partial(files.check_signature, trust=trust),
        "provenance": files.check_provenance,
        "recipe": checkpoint.check_recipe,
        "structure": checkpoint.check_structure,
        "gate": checkpoint.check_gate,
        "report": checkpoint.check_report,
        "card": checkpoint.check_card,
    }
    try:
        manifest = manifests.read(root / MANIFEST)
    except manifests.ManifestError as error:
        told = fails("manifest", error.message.replace(f"{root}/", ""))
        return (told, *(not_checked(name, f"{MANIFEST} cannot be read") for name in list(steps)[1:]))
    word = dict(vouched or {})
    progress.say("hashing every file, then inspecting the tensors")
    own = {name: size for name, size in there.files.items() if name not in word}
    try:
        with progress.bar(sum(own.values()), "B") as advance:
            found = {**word, **hashed({name: root / name for name in own}, advance)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    subject = Subject(root, there, found, manifest, progress, word, tag)
    return tuple(_made(name, check, subject) for name, check in steps.items())


def _made(name: str, check: Callable[[Subject], Check], subject: Subject) -> Check:
    """A check, however it ends: what a stranger wrote may break any reader, and that is a finding too."""
    try:
        return check(subject)
    except ModuleNotFoundError as error:
        return not_checked(name, f"this needs {error.name}, which is not installed", "pip install 'quantmint[all]'")
    except QuantmintError as error:
        return fails(name, error.message.replace(f"{subject.folder}/", ""))
    except Exception as error:  # the files are anybody's: whatever they break is named with its check
        return Check(name, Outcome.FAILS, f"it cannot be read: {type(error).__name__}: {str(error)[:200]}")


# From what a person names to a folder with a release's files: one that lies here, or what was fetched.


@contextmanager
def opened(subject: str, *, remote: bool, progress: Progress) -> Iterator[tuple[Path, Mapping[str, str], str | None]]:
    """What a person named: a folder, or PLACE or PLACE@TAG of releases, which may be a repository or a bucket.

    The release's folder, the SHA-256 of files there whose bytes were not fetched, by the word of the place, and the tag
    that was asked for. Raises `UserError` for a place that does not exist.
    """
    named = classify(subject)
    if remote:
        with tempfile.TemporaryDirectory(prefix="quantmint-verify-") as temporary:
            folder, vouched = _without_weights(open_place(named.place), named.revision, Path(temporary), progress)
            yield folder, vouched, named.revision
    elif named.kind == "folder" and named.revision is None:
        yield Path(subject), {}, None
    else:
        place = open_place(named.place)
        yield place.fetch(None, tag=named.revision, progress=progress), {}, named.revision


def _without_weights(place: Place, tag: str | None, into: Path, progress: Progress) -> tuple[Path, Mapping[str, str]]:
    from pipeline.publish.hub.client import connect
    from pipeline.publish.hub.place import HubPlace
    from pipeline.publish.hub.repository import download, tree

    if not isinstance(place, HubPlace):
        raise UserError(f"--remote: found {place.address}, expected a repository of the Hub (org/name)")
    client, revision = connect(place.repo, progress), place.revision_of(tag)
    large = {name: one for name, one in tree(client, revision).items() if name.endswith(".safetensors") and one.sha256}
    folder = download(client, revision, into / "release", lambda name: name not in large)
    for name, one in large.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(one.size)
    return folder, {name: str(one.sha256) for name, one in large.items()}


def record_of(subject: str, progress: Progress) -> Path | None:
    """The folder with the evidence of a release that lies elsewhere, fetched without its weights, or None."""
    named = classify(subject)
    if named.kind not in ("repository", "bucket"):
        return None

    def wanted(name: str) -> bool:
        return name == MANIFEST or name.startswith(f"{EVIDENCE}/")

    return open_place(named.place).fetch(None, tag=named.revision, progress=progress, wanted=wanted) / EVIDENCE
