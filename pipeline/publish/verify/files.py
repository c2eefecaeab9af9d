"""Whether quantmint.json agrees with itself, and with the files: the chain of stages, the names, every byte."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pipeline.publish.allowed import misnamed, refused
from pipeline.publish.manifest import contradictions
from pipeline.publish.release import MANIFEST, UNLISTED, identity_in, tag_of
from pipeline.publish.verify.check import Check, judged
from pipeline.publish.verify.subject import Subject


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
    faults = [f"{name} is missing" for name in listed if name not in there and not _strange(subject, name)]
    faults += subject.listing.strange
    faults += [f"{name} is there, but not in quantmint.json" for name in there if name not in {*listed, *UNLISTED}]
    faults += refused(there, with_code=code)
    faults += misnamed(_readable(subject))
    aside = [f"{name} is not of the release: the Hub's client left it" for name in subject.listing.aside[:3]]
    return judged("files", faults, f"{len(listed)} files, as quantmint.json lists them", details=aside)


def _readable(subject: Subject) -> dict[str, Path]:
    """What can be looked into: bytes that were fetched, and of text no more than a tokenizer has."""
    return {
        name: (subject.folder / name).resolve()  # a link was followed to see that it stays inside
        for name, size in subject.listing.files.items()
        if name not in subject.vouched and (size <= _LARGEST or name.endswith(".safetensors"))
    }


def _strange(subject: Subject, name: str) -> bool:
    return any(line.startswith(f"{name} ") for line in subject.listing.strange)


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
