"""Whether quantmint.json agrees with itself: fingerprints, and the chain of stages from the source to the verdict."""

from __future__ import annotations

from datetime import datetime

from pipeline import __version__
from pipeline.publish.manifest import contradictions
from pipeline.publish.release import MANIFEST, identity_in, tag_of
from pipeline.verify.check import Check, judged
from pipeline.verify.subject import Subject

NAME = "manifest"


def check(subject: Subject) -> Check:
    """Recompute every fingerprint from what it was made of, and follow the inputs back to the source."""
    manifest = subject.known
    faults = [f"quantmint.json: {sentence}" for sentence in contradictions(manifest)]
    faults += _unreached(subject)
    if subject.tag is not None and not subject.digests[MANIFEST].startswith(identity_in(subject.tag)):
        faults.append(f"another release lies under {subject.tag}: its identity is {subject.digests[MANIFEST][:16]}…")
    details = []
    if _numbers(manifest.quantmint) > _numbers(__version__):
        details.append(
            f"it was assembled by quantmint {manifest.quantmint}, this is {__version__}: a newer one knows more"
        )
    tag = tag_of(datetime.fromisoformat(manifest.created), subject.digests[MANIFEST])
    said = f"{manifest.title or manifest.name}; {tag}; {len(manifest.stages)} stages, every fingerprint recomputes"
    return judged(NAME, faults, said, details=details)


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


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for an order that is good enough to warn by."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal() or len(part) > 9:
            break
        found.append(int(part))
    return tuple(found)
