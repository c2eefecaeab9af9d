"""The digest of a model folder, with a memory for files that have not changed.

A 140 GB folder is read once: a file whose size, times and inode are those that were seen before keeps its digest. (The
time of change too, which no program can set: a modification time may be put back.) The memory is a file in the store;
losing it costs one reading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.canonical import fingerprint
from pipeline.errors import UserError
from pipeline.formats.tokenization import NAMED_TEMPLATES
from pipeline.store.disk import sha256_of

# What makes a model: nothing hidden, no caches, no pickled weights.
COMPANION_FILES = (
    "*.json", "*.txt", "*.model", "*.jinja", f"{NAMED_TEMPLATES}/*.jinja", "*.tiktoken",
    "LICENSE*", "LICENCE*", "NOTICE*", "Notice*", "USE_POLICY*",
)  # fmt: skip
MODEL_FILES = ("*.safetensors", *COMPANION_FILES, "*.py")
_MEMORY = "file-digests.json"


def model_files(folder: Path) -> tuple[Path, ...]:
    """The files of a model folder that belong to the model, sorted by name."""
    return tuple(sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}))


def file_digests(
    folder: Path, memory: Path, *, advance: Callable[[int], None] = lambda _: None
) -> dict[str, tuple[int, str]]:
    """Size in bytes and SHA-256 of each file of a model folder, by name.

    ``memory`` is the store's root. Raises `UserError` for a folder that is not there or holds no model.
    """
    files = model_files(folder) if folder.is_dir() else ()
    if not files:
        raise UserError(f"{folder}: no such folder, or no model files in it.")
    store = memory / _MEMORY
    known = _remembered(store)
    found: dict[str, tuple[int, str]] = {}
    fresh: dict[str, str] = {}
    for path in files:
        status = path.stat()
        mark = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"
        digest = known.get(mark) or sha256_of(path)
        fresh[mark] = digest
        found[path.relative_to(folder).as_posix()] = (status.st_size, digest)
        advance(status.st_size)
    if fresh.items() - known.items():
        _remember(store, {**known, **fresh})
    return found


def folder_digest(digests: dict[str, tuple[int, str]]) -> str:
    """One SHA-256 for a folder: over the names, sizes and digests of its files."""
    return fingerprint([[name, size, digest] for name, (size, digest) in sorted(digests.items())])


def _remembered(store: Path) -> dict[str, str]:
    try:
        memory = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(store: Path, digests: dict[str, str]) -> None:
    """Write the memory where that is possible; a store that refuses is told of by what must be written to it."""
    partial = store.with_name(f"{_MEMORY}.{os.getpid()}.partial")
    with suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(digests, indent=0), encoding="utf-8")
            partial.replace(store)
        finally:
            partial.unlink(missing_ok=True)
