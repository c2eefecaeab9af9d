"""Whether every byte is the one that was published: sizes and SHA-256 of all files, each read once."""

from __future__ import annotations

from pipeline.verify.check import Check, judged
from pipeline.verify.subject import Subject

NAME = "digests"


def check(subject: Subject) -> Check:
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
        NAME,
        faults,
        f"{len(subject.known.files)} files, {total:,} bytes, each with its SHA-256",
        details=word if subject.vouched else (),
    )
