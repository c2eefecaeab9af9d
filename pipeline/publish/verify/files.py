"""Whether quantmint.json agrees with itself, with every file and with the provenance; and who signed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.base.canonical import difference
from pipeline.base.errors import StageError
from pipeline.publish import signing
from pipeline.publish.allowed import misnamed, refused
from pipeline.publish.manifest import contradictions
from pipeline.publish.provenance import statement
from pipeline.publish.release import MANIFEST, PROVENANCE, SIGNATURE, UNLISTED, identity_in, tag_of
from pipeline.publish.signing import SignatureError, Signed, read_signature
from pipeline.publish.verify.subject import Check, Outcome, Subject, fails, first, judged, not_checked
from pipeline.store.files import File


def check_manifest(subject: Subject) -> Check:
    """Recompute every fingerprint from what it was made of, and follow the inputs back to the source."""
    manifest = subject.manifest
    faults = [f"quantmint.json: {sentence}" for sentence in contradictions(manifest)]
    if subject.tag is not None and not subject.digests[MANIFEST].startswith(identity_in(subject.tag)):
        faults.append(f"another release lies under {subject.tag}: its identity is {subject.digests[MANIFEST][:16]}…")
    tag = tag_of(datetime.fromisoformat(manifest.created), subject.digests[MANIFEST])
    said = f"{manifest.title or manifest.name}; {tag}; {len(manifest.stages)} stages, every fingerprint recomputes"
    return judged("manifest", faults, said)


_LARGEST = 1 << 26  # bytes of a file that is read whole; large tokenizers have half of that


def check_files(subject: Subject) -> Check:
    """Hold the names in the folder against those in the manifest, both ways."""
    there, listed = subject.listing.files, subject.manifest.files
    code = subject.manifest.recipe.get("trust_remote_code") is True
    faults = [f"{name} is missing" for name in listed if name not in there]
    faults += subject.listing.strange
    faults += [f"{name} is there, but not in quantmint.json" for name in there if name not in {*listed, *UNLISTED}]
    faults += refused(there, with_code=code)
    # What can be looked into: bytes that were fetched, and of text no more than a tokenizer has.
    faults += misnamed(
        {
            name: (subject.folder / name).resolve()  # a link was followed to see that it stays inside
            for name, size in there.items()
            if size <= _LARGEST or name.endswith(".safetensors")
        }
    )
    return judged("files", faults, f"{len(listed)} files, as quantmint.json lists them")


def check_digests(subject: Subject) -> Check:
    """Hold sizes and digests against the manifest."""
    faults: list[str] = []
    for name, said in subject.manifest.files.items():
        size = subject.listing.files.get(name)
        if size is None:
            continue  # that it is missing is said by the check of the files
        found = subject.digests[name]
        if size != said.size:
            faults.append(f"{name} was changed: it has {size:,} bytes, published were {said.size:,}")
        elif found != said.sha256:
            faults.append(f"{name} was changed: its SHA-256 is {found[:16]}…, published was {said.sha256[:16]}…")
    total = sum(said.size for said in subject.manifest.files.values())
    return judged("digests", faults, f"{len(subject.manifest.files)} files, {total:,} bytes, each with its SHA-256")


_UNSIGNED = (
    "the other checks prove that what lies here agrees with itself; whoever can write here could have made all of it "
    "anew, scores of items included: only a signature says who vouches for it"
)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a reader trusts: a public key (PEM), or an identity with its OpenID issuer; ``unsigned``: even nobody."""

    key: Path | None = None
    identity: str | None = None
    issuer: str | None = None
    unsigned: bool = False


def check_signature(subject: Subject, trust: Trust) -> Check:
    """Verify the signature by the trusted key or identity, and hold what it covers against every file."""
    path, trusted = subject.folder / SIGNATURE, trust.key is not None or trust.identity is not None
    if SIGNATURE not in subject.listing.files:
        lost = f"there is no {SIGNATURE}: nobody signed it, or the signature was taken away"
        return fails("signature", lost, _UNSIGNED) if trusted else _by_nobody(trust, "nobody signed it")
    faults: list[str] = []
    try:
        signed = read_signature(path)
        faults = _differences(subject, signed)
        if trusted:
            signing.verified(path, key=trust.key, identity=trust.identity, issuer=trust.issuer)
    except SignatureError as error:
        return fails("signature", error.message.replace(f"{subject.folder}/", "").rstrip("."), *faults)
    except StageError as error:
        return not_checked("signature", error.message)
    said = f"signed by {signed.signer}, over {len(signed.digests)} files"
    if trusted or faults:
        return judged("signature", faults, said)
    return _by_nobody(trust, f"{said}; no --key or --identity says who it should be")


def _by_nobody(trust: Trust, said: str) -> Check:
    outcome = Outcome.OK if trust.unsigned else Outcome.NOT_CHECKED
    return Check("signature", outcome, f"{said} (--unsigned accepts that)", (_UNSIGNED,))


def _differences(subject: Subject, signed: Signed) -> list[str]:
    covered = signed.digests
    here = {name: subject.digests[name] for name in subject.listing.files if name != SIGNATURE}
    shared = covered.keys() & here.keys()
    other = sorted(name for name in shared if covered[name] != here[name])
    lost, added = sorted(covered.keys() - here.keys()), sorted(here.keys() - covered.keys())
    faults = [f"{name} is not what was signed: it was changed since" for name in other]
    faults += [f"{name} was signed, and is not here" for name in lost]
    faults += [f"{name} is not covered by the signature" for name in added]
    return first(faults, "files")


def check_provenance(subject: Subject) -> Check:
    """Hold it against the statement that the manifest stands for."""
    manifest = subject.manifest
    found = subject.object(PROVENANCE)
    files = {name: File(subject.folder / name, file.size, file.sha256) for name, file in manifest.files.items()}
    other = [
        f"{PROVENANCE}: {change.path[2:]} is {change.new!r:.60}, quantmint.json says {change.old!r:.60}"
        for change in difference(statement(manifest, files), found)
    ]
    faults = first(other, f"differences of {PROVENANCE} from quantmint.json")
    base = manifest.base
    origin = f"{base.repo}@{base.commit}" if base.repo else f"a folder ({str(base.sha256)[:16]}…)"
    return judged("provenance", faults, f"from {origin} by {len(manifest.stages)} stages, as quantmint.json says")
