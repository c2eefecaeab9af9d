"""Which releases of a place are old enough to go.

Pure: `Target.remove` does it. The current release never goes, however old it is, and neither does a candidate; a
candidate is not one of those that are counted either, because nobody can go back to what readers never had.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from pipeline.publish.target import Listed


def outdated(
    releases: Sequence[Listed],
    *,
    keep: int,
    older_than: timedelta | None = None,
    now: datetime | None = None,
) -> tuple[str, ...]:
    """Tags of the releases beyond the newest ``keep``, the newest first.

    With ``older_than`` only those that were made longer ago than that, counted back from ``now`` (with a time zone).
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected at least 1")
    counted = sorted(
        (release for release in releases if not release.candidate),
        key=lambda release: (datetime.fromisoformat(release.created), release.tag),
        reverse=True,
    )
    latest = None if older_than is None or now is None else now - older_than
    return tuple(
        release.tag
        for release in counted[keep:]
        if not release.current and (latest is None or datetime.fromisoformat(release.created) < latest)
    )
