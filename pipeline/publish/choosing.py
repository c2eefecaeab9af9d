"""Which of the releases of a place is meant, by its tag or by being the only one.

named(releases, "v20261121-3f1c0a52", "my-org/name")    to roll back to
waiting(releases, None, "my-org/name")                  to promote
earlier(releases, "v20261121-3f1c0a52")                 to bring back
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.errors import UserError
from pipeline.publish.target import Listed
from pipeline.recipe.faults import did_you_mean


def named(releases: Sequence[Listed], tag: str, place: str) -> Listed:
    """The release of that tag; raises `UserError` with the nearest tag where there is none."""
    found = next((release for release in releases if release.tag == tag), None)
    if found is None:
        tags = [release.tag for release in releases]
        raise UserError(
            f"{place} has no release {tag}{did_you_mean(tag, tags)}",
            hint=f"`quantmint releases {place}` lists them." if tags else f"Nothing is published in {place} yet.",
        )
    return found


def waiting(releases: Sequence[Listed], tag: str | None, place: str) -> Listed:
    """The candidate of that tag, or the only one; the current release where that is named: it was promoted before.

    Raises `UserError` where none waits, several do, or the tag is that of an earlier release.
    """
    candidates = [release for release in releases if release.candidate]
    if tag is not None:
        found = named(releases, tag, place)
        if not (found.candidate or found.current):
            raise UserError(
                f"{tag} is an earlier release of {place}, expected a candidate"
                + (f" such as {candidates[0].tag}" if candidates else ""),
                hint=f"`quantmint rollback {place} {tag}` makes it the current one again.",
            )
        return found
    if not candidates:
        raise UserError(
            f"{place} has no candidate to promote",
            hint="`quantmint publish RECIPE --to candidate` publishes one.",
        )
    if len(candidates) > 1:
        tags = ", ".join(release.tag for release in candidates)
        raise UserError(f"{place} has {len(candidates)} candidates, expected the tag of one: {tags}")
    return candidates[0]


def earlier(releases: Sequence[Listed], tag: str) -> Listed | None:
    """The release of that tag if readers had it before; None where it is current, a candidate, or not there."""
    return next((one for one in releases if one.tag == tag and not (one.current or one.candidate)), None)


def removable(releases: Sequence[Listed], tags: Collection[str], place: str) -> tuple[Listed, ...]:
    """The releases of these tags; raises `UserError` where one is not there, is current or is a candidate."""
    found = tuple(named(releases, tag, place) for tag in dict.fromkeys(tags))
    for release in found:
        if release.current or release.candidate:
            state = "the current release" if release.current else "a candidate"
            raise UserError(f"{release.tag} is {state} of {place}, expected one that nobody is sent to")
    return found
