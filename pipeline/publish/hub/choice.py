"""Who chose what `main` holds, a run or a person: read from its commits.

    v20261121-3f1c0a52: Llama 3.3 70B ...     a run published it
    Return to v20261121-3f1c0a52              a run brought it back: its inputs are those again
    Promote v20261121-3f1c0a52                a person
    Roll back to v20261121-3f1c0a52           a person, who went back from what `main` had before
    Revert "v20261121-3f1c0a52: Llama ..."    the same, by git's own words

Pure. Other commits in between, such as an edit of the card, choose nothing; but one that gave `main` another release
by another way is a person's, and so is a pull request that was merged, of which nobody can say who merged it. A tag of
which the commits of `main` say nothing was taken away from there by force, or never was there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.publish.release import TAG, day_in

BY_HAND: Final = ("Promote", "Roll back to")
BROUGHT_BACK: Final = "Return to"
_PUBLISHED: Final = re.compile(rf"(?P<tag>{TAG.pattern})(?=:|$)")
_MOVED: Final = re.compile(rf"(?P<verb>{'|'.join((*BY_HAND, BROUGHT_BACK))}) (?P<tag>{TAG.pattern})$")
_MERGED: Final = re.compile(rf"(?P<tag>{TAG.pattern}): .* \(#\d+\)$")
_REVERTED: Final = re.compile(rf'Revert "?(?:{BROUGHT_BACK} )?(?P<tag>{TAG.pattern})')


@dataclass(frozen=True, slots=True)
class Choice:
    """``by_run``: a run made the release that `main` has the current one, and nobody chose since.

    ``left`` are tags that no run returns to: somebody went back from them, or they are ``foreign`` to `main`, whose
    commits say nothing of them.
    """

    by_run: bool
    left: frozenset[str]
    foreign: frozenset[str] = frozenset()


def choice(
    commits: Sequence[tuple[str, str]], shown: str | None, tags: Mapping[str, str], waiting: Collection[str] = ()
) -> Choice:
    """Read ``commits`` of `main` (identifier, first line; the newest first), which shows the release ``shown``.

    ``tags`` are the commits of the releases, ``waiting`` the tags that are candidates.
    """
    current: str | None = None
    by_run = False
    left: set[str] = set()
    named: set[str] = set()
    for _, title in reversed(commits):
        merged, moved = _MERGED.match(title), _MOVED.match(title)
        found = merged or moved or _PUBLISHED.match(title)
        reverted = _REVERTED.match(title)
        if reverted is not None:
            left.add(reverted["tag"])
            by_run = False
        if found is None:
            continue
        if moved is not None and moved["verb"] == BY_HAND[1] and current is not None:
            left.add(current)
        by_run = merged is None and (moved is None or moved["verb"] == BROUGHT_BACK)
        current = found["tag"]
        named.add(current)
        if not by_run:
            left.discard(current)
    if current != shown:
        by_run = False
        if current is not None:
            left.add(current)
    known = {commit for commit, _ in commits}
    foreign = frozenset(tag for tag, commit in tags.items() if not (tag in named or tag in waiting or commit in known))
    foreign -= {shown}
    if shown is None or any(day_in(tag) >= day_in(shown) for tag in foreign):
        by_run = False
    return Choice(by_run, (foreign | left) - {shown}, foreign)
