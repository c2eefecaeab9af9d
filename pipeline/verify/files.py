"""Whether the files are those that quantmint.json lists, no more and no fewer, and none that could run."""

from __future__ import annotations

from pathlib import Path

from pipeline.publish.allowed import misnamed, refused
from pipeline.publish.release import UNLISTED
from pipeline.verify.check import Check, judged
from pipeline.verify.subject import Subject

NAME = "files"
_LARGEST = 1 << 26  # bytes of a file that is read whole; large tokenizers have half of that


def check(subject: Subject) -> Check:
    """Hold the names in the folder against those in the manifest, both ways."""
    there, listed = subject.listing.files, subject.known.files
    code = subject.known.recipe.get("trust_remote_code") is True
    faults = [f"{name} is missing" for name in listed if name not in there and not _strange(subject, name)]
    faults += subject.listing.strange
    faults += [f"{name} is there, but not in quantmint.json" for name in there if name not in {*listed, *UNLISTED}]
    faults += refused(there, with_code=code)
    faults += misnamed(_readable(subject))
    aside = [f"{name} is not of the release: the Hub's client left it" for name in subject.listing.aside[:3]]
    return judged(NAME, faults, f"{len(listed)} files, as quantmint.json lists them", details=aside)


def _readable(subject: Subject) -> dict[str, Path]:
    """What can be looked into: bytes that were fetched, and of text no more than a tokenizer has."""
    return {
        name: (subject.folder / name).resolve()  # a link was followed to see that it stays inside
        for name, size in subject.listing.files.items()
        if name not in subject.vouched and (size <= _LARGEST or name.endswith(".safetensors"))
    }


def _strange(subject: Subject, name: str) -> bool:
    return any(line.startswith(f"{name} ") for line in subject.listing.strange)
