"""Conditions of a source model's licence on publishing a checkpoint that was made from it.

    >>> llama = terms({"license": "llama3.3"}, ("LICENSE", "USE_POLICY.md"))
    >>> llama.name, llama.prefix, llama.display
    ('Llama 3.3 Community License Agreement', 'Llama', ('Built with Llama.',))
    >>> refusal(llama, "my-org/My-Model-FP8")[:60]
    'its licence (Llama 3.3 Community License Agreement) has cond'

The table `licences.yaml` is a reading of the texts and no legal advice. A licence outside the table is not published.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.recipe.sections import Licence

Redistribution = Literal["yes", "conditions", "no", "unknown"]

TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "Notice*", "USE_POLICY*")
"""Patterns of the names of licence files."""
_COPIES = ("LICENSE*", "LICENCE*")


@dataclass(frozen=True, slots=True)
class Terms:
    """The licence terms of a source model.

    ``id`` is the Hub's field `license`, ``hub_name`` its `license_name` when ``id`` is "other". The name of a derived
    model must begin with ``prefix``; its card must show the sentences of ``display``; ``notice`` is the sentence of a
    file NOTICE; ``conditions`` are the publisher's other duties. ``files`` are the licence files beside the checkpoint,
    and ``text`` says that one is required. ``contradiction`` is the recipe's identifier when the card states another.
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
    """Return the terms in the source's card, or in the recipe's ``section`` if the card has none.

    ``files`` are the names of the files beside the checkpoint.
    """
    licence = section or Licence()
    stated = _stated(metadata)
    # Terms that were granted to the publisher alone are stated in the recipe: `other`, with a link.
    stated_by_recipe = licence.id == "other" and licence.link is not None
    key = stated if stated is not None else licence.id
    row = table().get(key or "", {})
    has_identifier = _text(metadata, "license") not in (None, "other")  # the Hub has an identifier
    granted = stated_by_recipe and bool(row)
    is_other = key is not None and (granted or row.get("hub") == "other" or (not row and not has_identifier))
    unnamed = "not stated" if key is None else "terms that were granted" if granted else key
    return Terms(
        id="unknown" if key is None else "other" if is_other else key,
        name=(None if granted else row.get("name")) or _text(metadata, "license_name") or unnamed,
        link=licence.link or _address(_text(metadata, "license_link"), files) or row.get("link"),
        hub_name=("granted" if granted else key if key != "other" else None) if is_other else None,
        redistribution="conditions" if stated_by_recipe else row.get("redistribution", "unknown"),
        prefix=row.get("prefix"),
        display=tuple(row.get("display", ())),
        notice=row.get("notice"),
        conditions=() if granted else tuple(row.get("conditions", ())),
        files=tuple(sorted(name for name in files if _matches_any(name, TEXTS))),
        text=bool(row.get("text")) and licence.link is None,
        acceptance=stated_by_recipe or bool(row.get("acceptance")),
        accepted=licence.accepted,
        contradiction=licence.id
        if licence.id not in (None, stated) and stated is not None and not stated_by_recipe
        else None,
    )


def refusal(base: Terms, name: str) -> str | None:
    """Return why a checkpoint must not be published as ``name`` (or ``org/name``) and what to do; None if it may be.

    For a folder, which nobody else reads, the callers show the sentence as a warning.
    """
    licence = f"its licence ({base.name})"
    if base.contradiction is not None:
        return (
            f"publish.licence.id says {base.contradiction}, the source's own card {base.hub_name or base.id}: leave"
            " it out, or say `other` with the link of the terms that were granted to you"
        )
    if base.redistribution == "unknown":
        return (
            f"{licence} is not in the table of licences, so nobody knows whether it may be passed on: say it by"
            " `publish: {licence: {id: ..., link: ...}}`, with `id: other, accepted: true` where no identifier fits"
        )
    if base.redistribution == "no":
        return f"{licence} does not allow to pass on what was made from it"
    if base.acceptance and not base.accepted:
        conditions = " ".join(base.conditions) or f"They are at {base.link}."
        return (
            f"{licence} has conditions. {conditions} Where they are met, say `publish: {{licence: {{accepted: true}}}}`"
        )
    if base.prefix is not None and not _begins(name.rpartition("/")[2], base.prefix):
        return f"{licence} asks for a name that begins with {base.prefix!r}, found {name!r}"
    if base.text and not any(_matches_any(file, _COPIES) for file in base.files):
        return (
            f"{licence} must go with the files, and the source has no LICENSE: put it into the source's folder, or say"
            " with publish.licence.link where readers get it"
        )
    return None


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of licences.yaml by identifier."""
    rows = load_table(__file__, "licences.yaml")
    merged = {key: {**rows.get(row.get("same"), {}), **row} for key, row in rows.items()}
    return MappingProxyType({key: MappingProxyType(row) for key, row in merged.items()})


def _stated(metadata: Mapping[str, Any]) -> str | None:
    """Return the licence identifier in a card; of "other" its license_name, as an identifier."""
    stated = metadata.get("license")
    if isinstance(stated, list):  # with several the one of the weights is unknown
        stated = stated[0] if len(stated) == 1 else None
    if not isinstance(stated, str) or stated.strip().lower() in ("", "unknown"):
        return None
    key = stated.strip().lower()
    if key != "other":
        return key
    name = _text(metadata, "license_name")
    return None if name is None else re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-") or None


def _address(text: str | None, files: Collection[str]) -> str | None:
    """Return a card's link if it works outside its repository: an https address, or one of the ``files``."""
    return text if text is not None and (text in files or re.fullmatch(r"https://[^\s<>]+", text)) else None


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value.strip() or None if isinstance(value, str) else None


def _matches_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _begins(name: str, prefix: str) -> bool:
    """Compare without case (recipes have lower-case names) and without separators (llama-3 and llama3)."""

    def plain(text: str) -> str:
        return "".join(char for char in text.casefold() if char.isalnum())

    return plain(name).startswith(plain(prefix))
