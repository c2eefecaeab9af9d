"""Whether every node would make the same bytes: the same code and libraries, and the same files under the same names.

Asked of each node before it is given anything. A file that we write is read there, and one that is written there is
read here: two folders of one name on two disks are found, also where both are empty.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline.engines.stream.shard import PARTIAL_SUFFIX
from pipeline.errors import UserError
from pipeline.versions import versions

_SHAPING = ("quantmint", "torch", "transformers", "tokenizers", "safetensors")
_CODE = "quantmint's code"
_ROOMS = ("calibration", "pipeline/cluster", "pipeline/engines", "pipeline/formats")  # that shape bytes on a node
_PROBE = ".quantmint-probe"
_SAMPLES, _SAMPLE = 8, 4096  # places in a file, and bytes at each
_ROOT = Path(__file__).parents[2]
HINT = "Every node needs the same installation and the same folders, on a filesystem that they share."


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node is: versions by name, digests of folders that are read, which files it saw, its processor."""

    versions: Mapping[str, str]
    folders: Mapping[str, str | None]
    seen: Mapping[str, str | None]
    processor: str
    free: int


def facts_here(folders: Sequence[Path], probes: Sequence[Path] = (), answer: str = "") -> Facts:
    """The facts of the machine that this runs on.

    ``folders`` are read: of each the names and sizes of its files, its config.json and samples of the rest. Each of
    ``probes`` is read, and ``answer`` is written beside it.
    """
    from calibration.room import free_bytes
    from pipeline.serving.host.device import cpu_name
    from pipeline.serving.host.machine import Machine

    seen: dict[str, str | None] = {}
    for probe in probes:
        try:
            seen[str(probe)] = probe.read_text(encoding="utf-8")
            _answered(probe, answer).write_text(answer, encoding="utf-8")
        except OSError:
            seen[str(probe)] = None
    known = {str(folder): _digest(folder) for folder in folders}
    return Facts(versions_here(), known, seen, cpu_name(Machine()), free_bytes("cpu"))


@lru_cache(maxsize=1)
def versions_here() -> Mapping[str, str]:
    """Versions of what shapes bytes, by name; of our own code a digest, for a version has many commits."""
    return {**versions(*_SHAPING), "Python": platform.python_version(), _CODE: _code()}


def require_versions(
    expected: Mapping[str, str], node: str | None = None, found: Mapping[str, str] | None = None
) -> None:
    """Raise `UserError` where a node (this one, unless it is named) differs, with what differs first."""
    there = versions_here() if found is None else found
    for name, version in expected.items():
        if (other := there.get(name)) != version:
            told = "is not what it is here" if name == _CODE else f"is {other} there and {version} here"
            raise UserError(f"{node or socket.gethostname()}: {name} {told}: its bytes might be others.", hint=HINT)


class Probe:
    """Files in ``folders``, which exist, that say whether a node sees what we see; removed by `close`.

    Their names are those of partial files: none becomes a part of a checkpoint where nobody came to remove it.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._token = secrets.token_hex(8)
        self.paths = tuple(folder / f"{_PROBE}-{self._token}{PARTIAL_SUFFIX}" for folder in folders)
        for path in self.paths:
            path.write_text(self._token, encoding="utf-8")

    def require_same(self, node: str, answer: str, there: Facts, here: Facts) -> None:
        """Raise `UserError` for a node that differs, with what differs first."""
        require_versions(here.versions, node, there.versions)
        for folder, digest in here.folders.items():
            if (found := there.folders[folder]) != digest:
                what = "is not there" if found is None else "holds other files there"
                raise UserError(f"{node}: {folder} {what}.", hint=HINT)
        for path in self.paths:
            if there.seen[str(path)] != self._token:
                raise UserError(f"{node}: {path.parent} is not the folder that it is here.", hint=HINT)
            try:
                came = _answered(path, answer).read_text(encoding="utf-8")
            except OSError:
                came = ""
            if came != answer:
                raise UserError(f"{node}: what it writes to {path.parent} is not seen here.", hint=HINT)

    def close(self) -> None:
        """Remove the files."""
        for path in self.paths:
            for one in path.parent.glob(f"{path.stem}*"):
                one.unlink(missing_ok=True)


def _answered(probe: Path, answer: str) -> Path:
    return probe.with_name(f"{probe.stem}-{answer}{probe.suffix}")


def _digest(folder: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file() and not entry.name.startswith(_PROBE):
                size = entry.stat().st_size
                digest.update(f"{entry.name} {size}\n".encode())
                _sample(digest, folder / entry.name, size)
        digest.update((folder / "config.json").read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def _sample(digest: hashlib._Hash, path: Path, size: int) -> None:
    """Two models that were trained from one have the same names and sizes, and hardly a weight in common."""
    with path.open("rb", buffering=0) as stream:
        for place in range(_SAMPLES):
            stream.seek(size * place // _SAMPLES)
            digest.update(stream.read(_SAMPLE))


def _code() -> str:
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
