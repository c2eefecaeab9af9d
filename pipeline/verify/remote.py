"""A release on the Hub, looked at without fetching its weights.

    with looked_at(target, None, progress) as (folder, vouched):
        ...

The Hub tells the SHA-256 of each large file, and lets a reader have the first bytes of one. So a safetensors file is
stood in for by its header in a file of the right size, whose other bytes take no room; all else is fetched.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.errors import StageError, UserError
from pipeline.progress import Progress
from pipeline.publish.names import require_safe

if TYPE_CHECKING:
    from pipeline.publish.hub.client import Client
    from pipeline.publish.hub.tree import Remote
    from pipeline.publish.target import Target

_WEIGHTS: Final = ".safetensors"
_HEADER: Final = 100_000_000  # bytes; the format's own limit
_FIRST: Final = 1 << 17  # bytes that are asked for at once: the header of most files
_REST: Final = 1 << 30  # bytes of all that is no weight; tokenizers take some ten million


@contextmanager
def looked_at(target: Target, tag: str | None, progress: Progress) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """A temporary folder with a release whose weights are stand-ins, and the SHA-256 that the Hub says they have.

    Raises `UserError` for a place that is no repository of the Hub, a repository or tag that is not there, and names
    or sizes that no release has.
    """
    from pipeline.publish.hub.client import connect
    from pipeline.publish.hub.download import read, revision_of
    from pipeline.publish.hub.target import HubTarget
    from pipeline.publish.hub.tree import tree

    if not isinstance(target, HubTarget):
        raise UserError(f"--remote: found {target.place}, expected a repository of the Hub (org/name)")
    client = connect(target.repo, progress)
    revision = revision_of(client, tag)
    found = tree(client, revision)
    try:
        require_safe(found)
    except ValueError as error:
        raise UserError(f"{target.place}: {error}") from None
    vouched = {
        name: remote.sha256 for name, remote in found.items() if name.endswith(_WEIGHTS) and remote.sha256 is not None
    }
    rest = sum(remote.size for name, remote in found.items() if name not in vouched)
    if rest > _REST:
        raise UserError(f"{target.place}: {rest:,} bytes that are no weights, expected at most {_REST:,}")
    with tempfile.TemporaryDirectory(prefix="quantmint-verify-") as temporary:
        folder = Path(temporary) / "release"
        folder.mkdir()
        progress.say(
            f"fetching {rest:,} bytes, and of {len(vouched)} shards the header, from {target.place}@{revision[:12]}"
        )
        for name, remote in found.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in vouched:
                _stand_in(client, revision, name, remote, path)
            else:
                path.write_bytes(read(client, revision, name, 0, remote.size))
        yield folder, vouched


def _stand_in(client: Client, revision: str, name: str, remote: Remote, path: Path) -> None:
    """A file with the header of a safetensors file, as long as that is."""
    from pipeline.publish.hub.download import read

    head = read(client, revision, name, 0, min(_FIRST, remote.size))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if length > _HEADER:
        raise UserError(f"{client.repo}: {name}: a header of {length:,} bytes, expected at most {_HEADER:,}")
    end = min(8 + length, remote.size)
    if end > len(head):
        head += read(client, revision, name, len(head), end)
    try:
        path.write_bytes(head[:end])
        with path.open("r+b") as file:
            file.truncate(remote.size)
    except OSError as error:
        raise StageError(f"{path}: cannot stand in for {remote.size:,} bytes: {error.strerror}") from error
