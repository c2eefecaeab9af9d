"""Reading what a stranger wrote: no more bytes than expected, no key twice, and nothing that lies elsewhere."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

LARGEST: Final = 1 << 25
"""Bytes of a text that is read whole. Parsed, they take about twenty times as much memory."""
_MOST_FILES = 100_000
_ASIDE = (".git/", ".cache/huggingface/")
"""What the Hub and its clients put beside a release: no part of it, and read by nothing that serves it."""


class UnreadableError(ValueError):
    """A file is not there, too large, or not what its name says; the message names it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a folder: sizes in bytes of regular files by name, what else there is, what clients left."""

    files: dict[str, int]
    strange: tuple[str, ...]
    aside: tuple[str, ...]


def listing(folder: Path) -> Listing:
    """Look at every name below a folder without opening one.

    A symbolic link counts as the file that it leads to where that lies in the folder, or among the blobs of the Hub's
    own cache; any other link, and whatever is neither a file nor a folder, is strange.
    """
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    files: dict[str, int] = {}
    strange: list[str] = []
    aside: list[str] = []
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        if name == ".gitattributes" or name.startswith(_ASIDE):
            aside.append(name)
            continue
        try:
            status = path.stat()
            inside = any(path.resolve().is_relative_to(place) for place in roots)
        except (OSError, RuntimeError):  # a link to nothing, or to itself
            strange.append(f"{name} leads nowhere")
            continue
        if not inside:
            strange.append(f"{name} is a link out of the folder")
        elif stat.S_ISREG(status.st_mode):
            files[name] = status.st_size
        else:
            strange.append(f"{name} is {'a link to a folder' if path.is_dir() else 'neither a file nor a folder'}")
    return Listing(dict(sorted(files.items())), tuple(strange), tuple(aside))


def _walk(root: Path) -> Iterator[Path]:
    """Everything below a folder but the folders themselves; links to folders are not followed."""
    seen = 0
    for at, folders, names in os.walk(root, followlinks=False, onerror=_unread):
        for name in (*names, *(name for name in folders if (Path(at) / name).is_symlink())):
            seen += 1
            if seen > _MOST_FILES:
                raise UnreadableError(f"more than {_MOST_FILES:,} files, which no release has")
            yield Path(at) / name


def _unread(error: OSError) -> NoReturn:
    """A folder that cannot be listed may hold anything."""
    raise UnreadableError(f"{error.filename} cannot be listed: {error.strerror}")


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """The bytes of a file; `UnreadableError` where it is not there or larger."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(largest + 1)
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(raw) > largest:
        raise UnreadableError(f"{path.name} is larger than {largest:,} bytes")
    return raw


def read_text(path: Path, *, largest: int = LARGEST) -> str:
    """A file as UTF-8 text."""
    try:
        return read_bytes(path, largest=largest).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path.name} is not UTF-8 at byte {error.start}") from None


def read_object(path: Path, *, largest: int = LARGEST) -> dict[str, Any]:
    """A file as one JSON object: of a key that is there twice, readers take different ones, so it is refused."""
    try:
        data = json.loads(read_bytes(path, largest=largest), object_pairs_hook=_once, parse_constant=_no_number)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UnreadableError(f"{path.name} holds no JSON object")
    return data


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
