"""Checks of quantmint.json against itself, every file and the provenance; and of the signature."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.canonical import difference
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.publish import signing
from quantmint.pipeline.publish.manifest import contradictions
from quantmint.pipeline.publish.provenance import ABSENT, statement
from quantmint.pipeline.publish.release import (
    CARD,
    MANIFEST,
    PROVENANCE,
    SBOM,
    SIGNATURE,
    UNLISTED,
    identity_in,
    tag_of,
)
from quantmint.pipeline.publish.screening import misnamed_files, refused_names
from quantmint.pipeline.publish.signing import SignatureError, SignedStatement, read_signature
from quantmint.pipeline.publish.verify.subject import (
    CheckOutcome,
    ReleaseCheck,
    ReleaseUnderTest,
    UnreadableError,
    conclude,
    failure,
    first_five,
    not_checked,
)
from quantmint.pipeline.store.files import File


def check_manifest(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Check the manifest: every fingerprint is recomputed, and inputs are followed back to the source.

    The release's tag and name must be those that the reader expects.
    """
    manifest = subject.manifest
    faults = [f"quantmint.json: {sentence}" for sentence in contradictions(manifest)]
    if subject.tag is not None and not subject.digests[MANIFEST].startswith(identity_in(subject.tag)):
        faults.append(f"another release lies under {subject.tag}: its identity is {subject.digests[MANIFEST][:16]}…")
    faults += _misplaced(subject)
    tag = tag_of(datetime.fromisoformat(manifest.created), subject.digests[MANIFEST])
    summary = f"{manifest.title or manifest.name}; {tag}; {len(manifest.stages)} stages, every fingerprint recomputes"
    return conclude("manifest", faults, summary)


def _misplaced(subject: ReleaseUnderTest) -> Iterator[str]:
    """Yield a fault for a release with another name than the reader expects; one signer may sign many releases.

    A repository of the Hub has another name than its recipe; the stage report records the published name.
    """
    manifest, expected = subject.manifest, subject.expected
    if expected is None:
        return
    name = manifest.name
    if expected.repository:
        settings: Any = manifest.stages["report"].payload["settings"]
        name = settings.get("published", expected.name)
    if name != expected.name:
        yield f"this is the release {name}, not {expected.name}, which was asked for (--name says which is expected)"


_LARGEST = 1 << 26  # bytes of a file that is read whole; large tokenizers have half as many


def check_files(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Compare the names in the folder with those in the manifest, both ways, and screen the files."""
    there, listed = subject.listing.files, subject.manifest.files
    code = subject.manifest.recipe.get("trust_remote_code") is True
    faults = [f"{name} is missing" for name in listed if name not in there]
    faults += subject.listing.strange
    faults += [f"{name} is there, but not in quantmint.json" for name in there if name not in {*listed, *UNLISTED}]
    faults += refused_names(there, with_code=code)
    # Weights are read as far as their header, so their size does not matter.
    faults += misnamed_files(
        {
            name: (subject.folder / name).resolve()  # `listing` checked that a link stays inside
            for name, size in there.items()
            if size <= _LARGEST or name.endswith(".safetensors")
        }
    )
    return conclude("files", faults, f"{len(listed)} files, as quantmint.json lists them")


def check_digests(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Check that the size and digest of every file agree with the manifest."""
    faults: list[str] = []
    for name, entry in subject.manifest.files.items():
        size = subject.listing.files.get(name)
        if size is None:
            continue  # `check_files` reports it
        sha256 = subject.digests[name]
        if size != entry.size:
            faults.append(f"{name} was changed: it has {size:,} bytes, published were {entry.size:,}")
        elif sha256 != entry.sha256:
            faults.append(f"{name} was changed: its SHA-256 is {sha256[:16]}…, published was {entry.sha256[:16]}…")
    total = sum(entry.size for entry in subject.manifest.files.values())
    return conclude("digests", faults, f"{len(subject.manifest.files)} files, {total:,} bytes, each with its SHA-256")


_UNSIGNED = (
    "the other checks prove that what lies here agrees with itself; whoever can write here could have made all of it "
    "anew, scores of items included: only a signature says who vouches for it"
)
_SAYS_SIGNED = re.compile(r"model_signing verify|quantmint (release )?verify \S+ --(key|identity) ")
"""Verification commands on a signed release's card, of every version of quantmint."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The signer whom the reader trusts: a public key (PEM), or an identity with its issuer.

    ``unsigned`` accepts a release without a signature.
    """

    key: Path | None = None
    identity: str | None = None
    issuer: str | None = None
    unsigned: bool = False


def check_signature(subject: ReleaseUnderTest, trust: Trust) -> ReleaseCheck:
    """Verify the signature by the trusted key or identity, and compare its digests with every file.

    Without a trusted signer a signature is NOT CHECKED. ``unsigned`` accepts a release that never was signed. It
    accepts no release that lost its signature, and none with the signature of a signer whom the reader does not name.
    """
    path, trusted = subject.folder / SIGNATURE, trust.key is not None or trust.identity is not None
    if SIGNATURE not in subject.listing.files:
        lost = f"there is no {SIGNATURE}: nobody signed it, or the signature was taken away"
        if _says_signed(subject):
            return failure("signature", f"{CARD} says that it is signed, and the signature was taken away", _UNSIGNED)
        if trusted:
            return failure("signature", lost, _UNSIGNED)
        if trust.unsigned:
            summary = "nobody signed it (--unsigned accepts that)"
            return ReleaseCheck("signature", CheckOutcome.OK, summary, (_UNSIGNED,), vouched=False)
        return not_checked("signature", "nobody signed it (--unsigned accepts that)", _UNSIGNED)
    faults: list[str] = []
    try:
        signed = read_signature(path)
        faults = _differences(subject, signed)
        if trusted:
            signing.verify_signature(path, key=trust.key, identity=trust.identity, issuer=trust.issuer)
    except SignatureError as error:
        return failure("signature", error.message.replace(f"{subject.folder}/", "").rstrip("."), *faults)
    except StageError as error:
        return not_checked("signature", error.message)
    summary = f"signed by {signed.signer}, over {len(signed.digests)} files"
    if trusted or faults:
        return conclude("signature", faults, summary)
    accepted = "; --unsigned accepts no signature, it is for releases without one" if trust.unsigned else ""
    return not_checked("signature", f"{summary}; no --key or --identity says who it should be{accepted}", _UNSIGNED)


def _says_signed(subject: ReleaseUnderTest) -> bool:
    try:
        return _SAYS_SIGNED.search(subject.text(CARD)) is not None
    except UnreadableError:
        return False  # `check_card` reports it


def _differences(subject: ReleaseUnderTest, signed: SignedStatement) -> list[str]:
    covered = signed.digests
    here = {name: subject.digests[name] for name in subject.listing.files if name != SIGNATURE}
    shared = covered.keys() & here.keys()
    changed = sorted(name for name in shared if covered[name] != here[name])
    lost, added = sorted(covered.keys() - here.keys()), sorted(here.keys() - covered.keys())
    faults = [f"{name} is not what was signed: it was changed since" for name in changed]
    faults += [f"{name} was signed, and is not here" for name in lost]
    faults += [f"{name} is not covered by the signature" for name in added]
    return first_five(faults, "files")


def check_provenance(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Check that the provenance statement and the bill of materials are those that follow from the manifest."""
    manifest = subject.manifest
    recorded = subject.object(PROVENANCE)
    files = {name: File(subject.folder / name, file.size, file.sha256) for name, file in manifest.files.items()}
    sentences = [
        f"{PROVENANCE}: {change.path[2:]} is {change.new!r:.60}, quantmint.json says {change.old!r:.60}"
        for change in difference(statement(manifest, files), recorded)
    ]
    faults = first_five(sentences, f"differences of {PROVENANCE} from quantmint.json")
    faults += first_five(list(_bill(subject)), f"differences of {SBOM} from quantmint.json")
    base = manifest.base
    origin = f"{base.repo}@{base.commit}" if base.repo else f"a folder ({str(base.sha256)[:16]}…)"
    return conclude("provenance", faults, f"from {origin} by {len(manifest.stages)} stages, as quantmint.json says")


def _bill(subject: ReleaseUnderTest) -> Iterator[str]:
    """Yield differences of the bill of materials from the manifest's model, files and tools."""
    manifest = subject.manifest
    bill = subject.object(SBOM)
    model = bill["metadata"]["component"]
    expected = (manifest.name, manifest.artefact[:16])
    if bill.get("bomFormat") != "CycloneDX" or (model["name"], model["version"]) != expected:
        yield f"{SBOM} is not about this checkpoint"
    hashes = {file["name"]: [digest["content"] for digest in file["hashes"]] for file in model["components"]}
    # The bill is written before the package stage adds the card.
    digests = {name: entry.sha256 for name, entry in manifest.files.items() if "/" not in name and name != CARD}
    for name in sorted(digests.keys() | hashes.keys() - {CARD}):
        listed = hashes.get(name, [])
        if name not in manifest.files or listed != [manifest.files[name].sha256]:
            yield f"{SBOM} has another digest of {name} than quantmint.json"
    named = {(component["name"], component["version"]) for component in bill.get("components", ())}
    for key, stage in manifest.stages.items():
        for name, version in stage.tools.items():
            if version != ABSENT and (name.lower().replace("_", "-"), version) not in named:
                yield f"{SBOM} lacks {name} {version}, which the stage {key} used"
