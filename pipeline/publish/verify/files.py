"""Whether quantmint.json agrees with itself, every file, provenance, bill of materials and licence; and who signed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.base.canonical import difference
from pipeline.base.errors import StageError
from pipeline.publish import signing
from pipeline.publish.allowed import misnamed, refused
from pipeline.publish.licences import table, terms
from pipeline.publish.manifest import contradictions
from pipeline.publish.provenance import PREDICATE_TYPE, STATEMENT_TYPE, statement
from pipeline.publish.release import CARD, MANIFEST, NOTICE, PROVENANCE, SBOM, SIGNATURE, UNLISTED, identity_in, tag_of
from pipeline.publish.signing import SignatureError, Signed, read_signature
from pipeline.publish.verify.subject import Check, Outcome, Subject, fails, first, judged, not_checked
from pipeline.store.files import File


def check_manifest(subject: Subject) -> Check:
    """Recompute every fingerprint from what it was made of, and follow the inputs back to the source."""
    manifest = subject.known
    faults = [f"quantmint.json: {sentence}" for sentence in contradictions(manifest)]
    faults += _unreached(subject)
    if subject.tag is not None and not subject.digests[MANIFEST].startswith(identity_in(subject.tag)):
        faults.append(f"another release lies under {subject.tag}: its identity is {subject.digests[MANIFEST][:16]}…")
    tag = tag_of(datetime.fromisoformat(manifest.created), subject.digests[MANIFEST])
    said = f"{manifest.title or manifest.name}; {tag}; {len(manifest.stages)} stages, every fingerprint recomputes"
    return judged("manifest", faults, said)


def _unreached(subject: Subject) -> list[str]:
    """What the verdict should rest on, but does not: followed from the report back by the inputs' fingerprints."""
    stages = subject.known.stages
    by_fingerprint = {made.fingerprint: key for key, made in stages.items()}
    reached: set[str] = set()
    waiting = [key for key in ("report",) if key in stages]
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            inputs = stages[key].payload.get("inputs")
            values = inputs.values() if isinstance(inputs, dict) else ()
            waiting += [by_fingerprint[value] for value in values if value in by_fingerprint]
    wanted = ("source", "quantize", "inspect", "gate")
    return [f"quantmint.json: the report does not rest on stage {key}" for key in wanted if key not in reached]


_LARGEST = 1 << 26  # bytes of a file that is read whole; large tokenizers have half of that


def check_files(subject: Subject) -> Check:
    """Hold the names in the folder against those in the manifest, both ways."""
    there, listed = subject.listing.files, subject.known.files
    code = subject.known.recipe.get("trust_remote_code") is True
    faults = [f"{name} is missing" for name in listed if name not in there]
    faults += subject.listing.strange
    faults += [f"{name} is there, but not in quantmint.json" for name in there if name not in {*listed, *UNLISTED}]
    faults += refused(there, with_code=code)
    # What can be looked into: bytes that were fetched, and of text no more than a tokenizer has.
    faults += misnamed(
        {
            name: (subject.folder / name).resolve()  # a link was followed to see that it stays inside
            for name, size in there.items()
            if name not in subject.vouched and (size <= _LARGEST or name.endswith(".safetensors"))
        }
    )
    aside = [f"{name} is not of the release: the Hub's client left it" for name in subject.listing.aside[:3]]
    return judged("files", faults, f"{len(listed)} files, as quantmint.json lists them", details=aside)


def check_digests(subject: Subject) -> Check:
    """Hold sizes and digests against the manifest."""
    faults: list[str] = []
    for name, said in subject.known.files.items():
        size = subject.listing.files.get(name)
        if size is None:
            continue  # that it is missing is said by the check of the files
        found = subject.digests[name]
        if size != said.size:
            faults.append(f"{name} was changed: it has {size:,} bytes, published were {said.size:,}")
        elif found != said.sha256:
            faults.append(f"{name} was changed: its SHA-256 is {found[:16]}…, published was {said.sha256[:16]}…")
    total = sum(said.size for said in subject.known.files.values())
    word = [
        f"the SHA-256 of {len(subject.vouched)} files ({', '.join(sorted(subject.vouched)[:3])}…) is the Hub's word: "
        "their bytes were not fetched"
    ]
    return judged(
        "digests",
        faults,
        f"{len(subject.known.files)} files, {total:,} bytes, each with its SHA-256",
        details=word if subject.vouched else (),
    )


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

    @property
    def someone(self) -> bool:
        """Whether a signer is named."""
        return self.key is not None or self.identity is not None


def check_signature(subject: Subject, trust: Trust) -> Check:
    """Verify the signature by the trusted key or identity, and hold what it covers against every file."""
    if not subject.has(SIGNATURE):
        if trust.unsigned:
            return Check("signature", Outcome.OK, "nobody signed it, which --unsigned accepts", (_UNSIGNED,))
        if trust.someone:
            lost = f"there is no {SIGNATURE}: nobody signed it, or the signature was taken away"
            return fails("signature", lost, _UNSIGNED)
        return not_checked("signature", "nobody signed it (--unsigned accepts that)", _UNSIGNED)
    try:
        signed = read_signature(subject.folder / SIGNATURE)
    except SignatureError as error:
        return fails("signature", _short(subject, error))
    faults = _differences(subject, signed)
    if not trust.someone:
        if faults:
            return fails("signature", *faults)
        reason = f"it is signed by {signed.signer}; no --key or --identity says who it should be"
        if trust.unsigned:
            return Check("signature", Outcome.OK, f"{reason}, which --unsigned accepts", (_UNSIGNED,))
        return not_checked("signature", reason, "anybody can sign a release, and call himself anything")
    try:
        signing.verified(subject.folder / SIGNATURE, key=trust.key, identity=trust.identity, issuer=trust.issuer)
    except SignatureError as error:
        return fails("signature", _short(subject, error), *faults)
    except StageError as error:
        return not_checked("signature", error.message)
    on_word = [f"of {len(subject.vouched)} files the digest was taken on the Hub's word"] if subject.vouched else ()
    said = f"signed by {signed.signer}, over every one of {len(signed.digests)} files"
    return judged("signature", faults, said, details=on_word)


def _short(subject: Subject, error: SignatureError) -> str:
    return error.message.replace(f"{subject.folder}/", "").replace(f"{subject.folder} ", "the folder ").rstrip(".")


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
    """Hold the subjects against the files, then the rest against the statement that the manifest stands for."""
    manifest = subject.known
    found = subject.object(PROVENANCE)
    if (found.get("_type"), found.get("predicateType")) != (STATEMENT_TYPE, PREDICATE_TYPE):
        return fails("provenance", f"{PROVENANCE} is no in-toto statement of SLSA provenance v1")
    faults = list(_subjects(subject, found.get("subject")))
    files = {name: File(subject.folder / name, file.size, file.sha256) for name, file in manifest.files.items()}
    expected = statement(manifest, files)
    other = [change for change in difference(expected, found) if not change.path.startswith("$.subject")]
    faults += first(
        [
            f"{PROVENANCE}: {change.path[2:]} is {change.new!r:.60}, quantmint.json says {change.old!r:.60}"
            for change in other
        ],
        f"differences of {PROVENANCE} from quantmint.json",
    )
    base = manifest.base
    origin = f"{base.repo}@{base.commit}" if base.repo else f"a folder ({str(base.sha256)[:16]}…)"
    return judged("provenance", faults, f"from {origin} by {len(manifest.stages)} stages, as quantmint.json says")


def _subjects(subject: Subject, found: object) -> Iterator[str]:
    """Files of which the statement speaks otherwise than they are; each once."""
    if not isinstance(found, list):
        yield f"{PROVENANCE} has no subjects"
        return
    said: dict[str, Any] = {}
    for entry in found:
        name, digest = entry["name"], entry["digest"]["sha256"]
        if name in said:
            yield f"{PROVENANCE} speaks twice of {name}"
        said[name] = digest
    wanted = {name for name in subject.known.files if name != PROVENANCE}
    for name in sorted(said.keys() | wanted):
        if name not in wanted:
            yield f"{PROVENANCE} speaks of {name}, which quantmint.json does not list"
        elif name not in said:
            yield f"{PROVENANCE} does not speak of {name}"
        elif subject.digests.get(name, said[name]) != said[name]:
            yield f"{PROVENANCE} speaks of another {name}: its SHA-256 is not that of the file"


def check_sbom(subject: Subject) -> Check:
    """Read the CycloneDX document and look every recorded tool up in it."""
    data = subject.object(SBOM)
    if data.get("bomFormat") != "CycloneDX" or not isinstance(data.get("components"), list):
        return fails("sbom", f"{SBOM} is no CycloneDX document")
    listed = {(entry.get("name"), entry.get("version")) for entry in data["components"] if isinstance(entry, dict)}
    faults = [
        f"{SBOM} does not list {tool} {version}, which quantmint.json names"
        for tool, versions in subject.known.tools.items()
        for version in versions.split(", ")
        if (tool.lower().replace("_", "-"), version) not in listed
    ]
    faults += _model(subject, data)
    return judged("sbom", faults, f"{len(listed)} components, every recorded tool among them")


def _model(subject: Subject, data: Mapping[str, Any]) -> Iterator[str]:
    for entry in data["metadata"]["component"].get("components", ()):
        found = {content["content"] for content in entry["hashes"] if content["alg"] == "SHA-256"}
        here = subject.known.files.get(entry["name"])
        if here is None or found != {here.sha256}:
            yield f"{SBOM} speaks of another {entry['name']} than quantmint.json"


def check_licence(subject: Subject) -> Check:
    """Look the licence that the card names up, and what it asks for among the files."""
    text = subject.text(CARD)
    data = subject.front_matter
    top = [name for name in subject.listing.files if "/" not in name]
    found = terms(data, top)
    key = found.hub_name or found.id
    if key not in table():
        named = f"{found.name} is not in the table of licences" if key != "unknown" else "the card names no licence"
        return not_checked("licence", f"{named}, so what it asks of those who pass the model on is not known here")
    faults = []
    link = data.get("license_link")
    copies = [name for name in found.files if name.upper().startswith(("LICENSE", "LICENCE"))]
    if table()[key].get("text") and not copies and not link:
        faults.append(f"{found.name} must go with the files, and there is neither LICENSE nor a link to it")
    notices = [name for name in (NOTICE, *found.files) if subject.has(name)]
    if found.notice is not None and not any(found.notice in _flat(subject.text(name)) for name in notices):
        faults.append(f"{found.name} asks for a file NOTICE that says: {found.notice}")
    faults += [
        f"{found.name} asks the card to say: {sentence}"
        for sentence in found.display
        if _flat(sentence) not in _flat(text)
    ]
    beside = f", with {', '.join(found.files)}" if found.files else ""
    return judged("licence", faults, f"{found.name}{beside}")


def _flat(text: str) -> str:
    return " ".join(re.sub(r"\\(.)", r"\1", text).split())
