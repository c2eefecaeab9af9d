"""Who chose what `main` holds, a run or a person: read from the first lines of its commits.

    v20261121-3f1c0a52: Llama 3.3 70B ...     a run published it
    Return to v20261121-3f1c0a52              a run brought it back: its inputs are those again
    Promote v20261121-3f1c0a52                a person
    Roll back to v20261121-3f1c0a52           a person

Pure. Other commits in between, such as an edit of the card, choose nothing; but one that gave `main` another release
by another way is a person's, and so is a pull request that was merged, of which nobody can say who merged it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pipeline.publish.release import TAG

BY_HAND: Final = ("Promote", "Roll back to")
BROUGHT_BACK: Final = "Return to"
_PUBLISHED: Final = re.compile(rf"(?P<tag>{TAG.pattern})(?=:|$)")
_MOVED: Final = re.compile(rf"(?P<verb>{'|'.join((*BY_HAND, BROUGHT_BACK))}) (?P<tag>{TAG.pattern})$")
_MERGED: Final = re.compile(rf"{TAG.pattern}: .* \(#\d+\)$")


def chosen_by_run(titles: Iterable[str], shown: str) -> bool:
    """Whether a run made the release ``shown`` that `main` has; ``titles`` are those of its commits, newest first.

    False where none of them says so.
    """
    for title in titles:
        if _MERGED.match(title):
            return False
        moved = _MOVED.match(title)
        if moved is not None:
            return moved["verb"] == BROUGHT_BACK and moved["tag"] == shown
        published = _PUBLISHED.match(title)
        if published is not None:
            return published["tag"] == shown
    return False
