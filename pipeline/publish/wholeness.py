"""Whether a release that was published earlier still has its files, before readers are sent to it again."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import StageError
from pipeline.publish import manifest
from pipeline.publish.release import MANIFEST, identity_in


class DamagedError(StageError):
    """A place answers, and what lies there under the name of a release is not that release."""


def require_whole(raw: bytes, tag: str, sizes: Mapping[str, int], place: str) -> None:
    """Raise `DamagedError` where what lies under a tag is not that release.

    ``raw`` are the bytes of its manifest, which its tag vouches for; ``sizes`` are those of the files that are there,
    in bytes. Each file's size is compared, not its digest: going back must not take the time of reading a model, and
    `quantmint verify` reads everything.
    """
    hint = "What readers get stays as it is. Publish the release again, or choose another one."
    if not manifest.identity(raw).startswith(identity_in(tag)):
        raise DamagedError(f"{place} is damaged: its {MANIFEST} is not that of {tag}", hint=hint)
    for name, file in manifest.decode(raw, what=f"{place}/{MANIFEST}").files.items():
        if sizes.get(name) != file.size:
            found = f"found {sizes[name]:,} bytes" if name in sizes else "it is missing"
            raise DamagedError(f"{place} is damaged: {name}: {found}, expected {file.size:,} bytes", hint=hint)
