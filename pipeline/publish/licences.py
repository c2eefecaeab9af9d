"""What the licence of a base model asks of those who pass on a checkpoint that was made from it.

    >>> found = terms({"license": "llama3.3"}, ("LICENSE", "USE_POLICY.md"))
    >>> found.name, found.prefix, found.display
    ('Llama 3.3 Community License Agreement', 'Llama', ('Built with Llama.',))
    >>> refusal(found, "my-org/My-Model-FP8")[:60]
    'its licence (Llama 3.3 Community License Agreement) has cond'

The table is `licences.yaml`: a reading of the texts and no legal advice. What it does not know is not passed on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from quantmint.pipeline.base.data import beside
from quantmint.pipeline.recipe.sections import Licence

Redistribution = Literal["yes", "conditions", "no", "unknown"]

TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "Notice*", "USE_POLICY*")
"""Names of the files that a licence is in."""
_COPIES = ("LICENSE*", "LICENCE*")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a base model.

    ``id`` is what the Hub reads under `license`, ``hub_name`` what under `license_name` where that is "other".
    ``prefix`` is what the name of a derived model must begin with, ``display`` sentences that its card must show,
    ``notice`` the sentence of a file NOTICE, ``conditions`` what else is asked of who passes it on. ``files`` are the
    texts that lie beside the checkpoint; ``text`` says that one must. ``contradiction`` is what the recipe says where
    the card says something else.
    """

    id: str
    name: str
    link: str | None = None
    hub_name: str | None = None
    redistribution: Redistribution = "unknown"
    prefix: str | None = None
    display: tuple[str, ...] = ()
    notice: str | None = None
    conditions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    text: bool = False
    acceptance: bool = False
    accepted: bool = False
    contradiction: str | None = None


def terms(metadata: Mapping[str, Any], files: Collection[str], section: Licence | None = None) -> Terms:
    """The terms that the base's card states, or the recipe where it is silent; ``files`` lie beside the checkpoint."""
    given = section or Licence()
    stated = _stated(metadata)
    # Terms that somebody was granted are his to state: `other`, with a link to them.
    own = given.id == "other" and given.link is not None
    key = stated if stated is not None else given.id
    row = table().get(key or "", {})
    named = _text(metadata, "license") not in (None, "other")  # by the Hub's own identifier
    granted = own and bool(row)
    other = key is not None and (granted or row.get("hub") == "other" or (not row and not named))
    unnamed = "not stated" if key is None else "terms that were granted" if granted else key
    return Terms(
        id="unknown" if key is None else "other" if other else key,
        name=(None if granted else row.get("name")) or _text(metadata, "license_name") or unnamed,
        link=given.link or _address(_text(metadata, "license_link"), files) or row.get("link"),
        hub_name=("granted" if granted else key if key != "other" else None) if other else None,
        redistribution="conditions" if own else row.get("redistribution", "unknown"),
        prefix=row.get("prefix"),
        display=tuple(row.get("display", ())),
        notice=row.get("notice"),
        conditions=() if granted else tuple(row.get("conditions", ())),
        files=tuple(sorted(name for name in files if _is_one(name, TEXTS))),
        text=bool(row.get("text")) and given.link is None,
        acceptance=own or bool(row.get("acceptance")),
        accepted=given.accepted,
        contradiction=given.id if given.id not in (None, stated) and stated is not None and not own else None,
    )


def refusal(found: Terms, name: str) -> str | None:
    """Why a checkpoint must not be passed on under a name (``org/name`` or ``name``), with what to do; None: it may.

    Of a folder, which nobody else reads yet, the same sentence is a warning.
    """
    licence = f"its licence ({found.name})"
    if found.contradiction is not None:
        return (
            f"publish.licence.id says {found.contradiction}, the source's own card {found.hub_name or found.id}: leave"
            " it out, or say `other` with the link of the terms that were granted to you"
        )
    if found.redistribution == "unknown":
        return (
            f"{licence} is not in the table of licences, so nobody knows whether it may be passed on: say it by"
            " `publish: {licence: {id: ..., link: ...}}`, with `id: other, accepted: true` where no identifier fits"
        )
    if found.redistribution == "no":
        return f"{licence} does not allow to pass on what was made from it"
    if found.acceptance and not found.accepted:
        asked = " ".join(found.conditions) or f"They are at {found.link}."
        return f"{licence} has conditions. {asked} Where they are met, say `publish: {{licence: {{accepted: true}}}}`"
    if found.prefix is not None and not _begins(name.rpartition("/")[2], found.prefix):
        return f"{licence} asks for a name that begins with {found.prefix!r}, found {name!r}"
    if found.text and not any(_is_one(file, _COPIES) for file in found.files):
        return (
            f"{licence} must go with the files, and the source has no LICENSE: put it into the source's folder, or say"
            " with publish.licence.link where readers get it"
        )
    return None


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Every licence that is known, by its identifier."""
    rows = beside(__file__, "licences.yaml")
    whole = {key: {**rows.get(row.get("same"), {}), **row} for key, row in rows.items()}
    return MappingProxyType({key: MappingProxyType(row) for key, row in whole.items()})


def _stated(metadata: Mapping[str, Any]) -> str | None:
    """The identifier that a card states; what it calls "other" goes by its name there."""
    found = metadata.get("license")
    if isinstance(found, list):  # of several nobody knows which is that of the weights
        found = found[0] if len(found) == 1 else None
    if not isinstance(found, str) or found.strip().lower() in ("", "unknown"):
        return None
    key = found.strip().lower()
    if key != "other":
        return key
    name = _text(metadata, "license_name")
    return None if name is None else re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-") or None


def _address(text: str | None, files: Collection[str]) -> str | None:
    """A card's link where it leads somewhere from here too: into the web, or to a file that came along."""
    return text if text is not None and (text in files or re.fullmatch(r"https://[^\s<>]+", text)) else None


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    found = metadata.get(key)
    return found.strip() or None if isinstance(found, str) else None


def _is_one(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _begins(name: str, prefix: str) -> bool:
    """Case does not count, since recipes' names are small, nor what stands between a name and its number."""

    def plain(text: str) -> str:
        return "".join(char for char in text.casefold() if char.isalnum())

    return plain(name).startswith(plain(prefix))
