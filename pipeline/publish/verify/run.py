"""All checks of a release, one after the other; what one finds keeps no other from being made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pipeline.base.errors import QuantmintError, UserError
from pipeline.base.progress import Progress
from pipeline.publish import manifest as manifests
from pipeline.publish.release import MANIFEST
from pipeline.publish.signing import hashed, public_fingerprint
from pipeline.publish.verify.checkpoint import check_card, check_gate, check_recipe, check_report, check_structure
from pipeline.publish.verify.files import (
    Trust,
    check_digests,
    check_files,
    check_licence,
    check_manifest,
    check_provenance,
    check_sbom,
    check_signature,
)
from pipeline.publish.verify.subject import Check, Outcome, Subject, UnreadableError, fails, listing, not_checked

_ALONE = ("signature", "recipe", "structure", "gate", "report")
"""Checks that can be made where quantmint.json cannot be read."""


def verify(
    folder: Path,
    trust: Trust,
    progress: Progress,
    *,
    vouched: Mapping[str, str] | None = None,
    tag: str | None = None,
) -> tuple[Check, ...]:
    """Check a release that lies in ``folder``; nothing is written, no code of it is run, nothing of it is shown.

    ``vouched`` are SHA-256 by name of files whose bytes were not fetched: in their place lie files of the right size
    with a header. ``tag`` is that of the release which should be there. Raises `UserError` where there is no release at
    all, and for a key that is none.
    """
    if trust.key is not None:
        public_fingerprint(trust.key)  # what is wrong with a reader's own key is not the release's fault
    root = folder.resolve()
    if not root.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        there = listing(root)
    except UnreadableError as error:
        raise UserError(f"{folder}: {error}") from None
    if MANIFEST not in there.files:
        raise UserError(
            f"{folder}: found no {MANIFEST}, so this is no release of quantmint",
            hint="`quantmint inspect` proves any checkpoint's structure.",
        )
    word = dict(vouched or {})
    progress.say("hashing every file, then inspecting the tensors")
    own = {name: size for name, size in there.files.items() if name not in word}
    try:
        with progress.bar(sum(own.values()), "B") as advance:
            found = {**word, **hashed({name: root / name for name in own}, advance)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    manifest, unread = None, None
    try:
        manifest = manifests.read(root / MANIFEST)
    except manifests.NewerManifestError as error:
        unread = not_checked("manifest", error.message.replace(f"{root}/", ""), "install a newer quantmint")
    except manifests.ManifestError as error:
        unread = fails("manifest", error.message.replace(f"{root}/", ""))
    subject = Subject(root, there, found, manifest, progress, word, tag)
    steps: dict[str, Callable[[Subject], Check]] = {
        "manifest": check_manifest,
        "files": check_files,
        "digests": check_digests,
        "signature": partial(check_signature, trust=trust),
        "provenance": check_provenance,
        "recipe": check_recipe,
        "structure": check_structure,
        "gate": check_gate,
        "report": check_report,
        "card": check_card,
        "sbom": check_sbom,
        "licence": check_licence,
    }
    checks: list[Check] = []
    for name, check in steps.items():
        if unread is not None and name == "manifest":
            checks.append(unread)
        elif manifest is None and name not in _ALONE:
            checks.append(not_checked(name, f"{MANIFEST} cannot be read"))
        else:
            checks.append(_made(name, check, subject))
    return tuple(checks)


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
