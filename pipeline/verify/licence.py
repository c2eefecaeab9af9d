"""Whether what the base's licence asks of those who pass it on is there: its text, its notice, its sentences."""

from __future__ import annotations

import re
from typing import Any

from pipeline.publish.licences import table, terms
from pipeline.publish.release import CARD, NOTICE
from pipeline.recipe.yaml_positions import parse
from pipeline.verify.check import Check, judged, not_checked
from pipeline.verify.subject import Subject

NAME = "licence"


def check(subject: Subject) -> Check:
    """Look the licence that the card names up, and what it asks for among the files."""
    text = subject.text(CARD)
    front = re.match(r"---\n(.*?\n)---\n", text, re.DOTALL)
    data: dict[str, Any] = parse(front[1], CARD).data if front else {}
    top = [name for name in subject.listing.files if "/" not in name]
    found = terms(data, top)
    key = found.hub_name or found.id
    if key not in table():
        named = f"{found.name} is not in the table of licences" if key != "unknown" else "the card names no licence"
        return not_checked(NAME, f"{named}, so what it asks of those who pass the model on is not known here")
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
    return judged(NAME, faults, f"{found.name}{beside}")


def _flat(text: str) -> str:
    return " ".join(re.sub(r"\\(.)", r"\1", text).split())
