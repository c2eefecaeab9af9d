"""Versions of installed distributions, as their own metadata says; nothing is imported."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution


def versions(*distributions: str) -> dict[str, str]:
    """Installed versions by distribution, "absent" for one that is not there; nothing is imported."""
    from importlib import metadata

    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = _version(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _version(distribution: Distribution) -> str:
    """Its version by the line that says it: `Distribution.version` parses a package's whole description for it.

    Plans ask for a dozen versions each, and many recipes are planned at once.
    """
    head, _, _ = (distribution.read_text("METADATA") or "").partition("\n\n")
    said = re.search(r"^Version: *(\S+) *$", head, re.MULTILINE)
    return distribution.version if said is None else said[1]
