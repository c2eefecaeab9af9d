"""What may be in a release: by its name, and by what is really in it.

A list of what may go out, not of what may not: a file that nobody thought of stays here. Names that are refused for a
reason which people should know come with that reason.
"""

from __future__ import annotations

import gzip
import json
import re
import stat
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from pipeline.base.errors import UserError
from pipeline.publish.release import CARD, EVIDENCE, MANIFEST, NOTICE, PROVENANCE, RECIPE, SBOM, SIGNATURE
from pipeline.quantize.digest import NAMED_TEMPLATES
from pipeline.quantize.formats.checkpoint import read_header
from pipeline.store.files import require_safe

SCORES: Final = ".eval_results"
"""Folder of a release that the Hub reads scores from."""
ATTRIBUTES: Final = ".gitattributes"
"""What the Hub itself adds to a repository: it says which files it keeps outside git."""

# The first that fits any part of a name gives the reason; what fits none must still be of a kind that is allowed.
_REASONS: Final = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r".*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|dill|npy|npz|h5|hdf5|keras|msgpack|mar|nemo|tar|zip)",
            "a pickle, or may hold one, which runs code when it is loaded",
        ),
        (r".*\.py", "code that readers would have to trust; the recipe does not say `trust_remote_code`"),
        (
            r"\.env.*|\.netrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx|jks|kdbx?|gpg|asc|token)"
            r"|(client_)?(credentials?|secrets?|passwords?|token|service[-_]account)(\.\w+)?|kubeconfig.*",
            "may hold a key, a token or a password",
        ),
        (r"\..*", "a hidden file"),
    )
)
_LICENCES = r"(LICEN[SC]E|NOTICE|Notice|USE_POLICY)[A-Za-z0-9 ._-]*"
_CHECKPOINT = (
    rf"[^/]+\.(safetensors|json|txt|model|jinja|tiktoken)|{NAMED_TEMPLATES}/[^/]+\.jinja|recipe\.yaml|{_LICENCES}"
)
_ALLOWED: Final = re.compile(
    "|".join(
        (
            rf"{_CHECKPOINT}|{re.escape(SCORES)}/[^/]+\.ya?ml",
            *(re.escape(name) for name in (CARD, MANIFEST, SIGNATURE, ATTRIBUTES, RECIPE, PROVENANCE, SBOM, NOTICE)),
            rf"{EVIDENCE}/([^/]+/)*[^/]+\.(json|json\.gz|jsonl\.gz|html|md|xml)",
        )
    )
)
_CODE: Final = re.compile(r"[^/]+\.py")  # as the Hub's clients look for it: at the top, nowhere else
_MAGIC: Final = (
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"PK(\x03\x04|\x05\x06)"), "a zip archive, which is how `torch.save` writes a pickle"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
    (re.compile(rb"\x89HDF"), "HDF5"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), "a compressed file"),
    (re.compile(rb"\x7fELF|MZ.\x00|#!"), "a program"),
)
_HEAD = 512  # bytes; as far as the last of them looks


def refused(names: Iterable[str], *, listed: Collection[str] | None = None, with_code: bool = False) -> tuple[str, ...]:
    """A line for each name that must not go out: the name, and why.

    ``listed`` are the names that the release says it has (None: not asked). ``with_code`` lets Python files at the top
    pass: the recipe trusts the source's code, at a pinned revision.
    """
    names = list(names)
    try:
        require_safe(names)
    except ValueError as error:
        return (f"{error}",)
    found = ((name, _reason(name, listed, with_code)) for name in names)
    return tuple(f"{name}: {reason}" for name, reason in found if reason is not None)


def _reason(name: str, listed: Collection[str] | None, with_code: bool) -> str | None:
    parts = name.split("/")
    known = name == ATTRIBUTES or parts[0] == SCORES
    for part in parts[1:] if known else parts:
        lowered = part.casefold()
        for pattern, reason in _REASONS:
            if pattern.fullmatch(lowered):
                if with_code and _CODE.fullmatch(name):
                    break
                return reason
    if not _ALLOWED.fullmatch(name) and not (with_code and _CODE.fullmatch(name)):
        return "not a kind of file that a release holds"
    if listed is not None and name not in listed:
        return "not in the manifest"
    return None


def misnamed(files: Mapping[str, Path]) -> tuple[str, ...]:
    """A line for each file that is not what its name says; ``files`` are paths by their names in the release.

    Weights are read as far as their header, JSON and text whole. A symbolic link is none of them.
    """
    found = ((name, _disguise(name, path)) for name, path in files.items())
    return tuple(f"{name}: {fault}" for name, fault in found if fault is not None)


def _disguise(name: str, path: Path) -> str | None:
    try:
        if path.is_symlink() or not stat.S_ISREG(path.stat().st_mode):
            return "not a file"
        return _content(name, path)
    except (OSError, EOFError, zlib.error) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _content(name: str, path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    magic = next((kind for pattern, kind in _MAGIC if pattern.match(head)), None)
    if name.endswith(".safetensors"):
        # Its first bytes are a length, which may look like anything: 640 is how a pickle begins.
        try:
            read_header(path)
        except UserError as error:
            return f"{magic}, no safetensors" if magic else error.message.removeprefix(f"{path}: ").rstrip(".")
        return None
    if name.endswith(".gz"):
        if not head.startswith(b"\x1f\x8b"):
            return f"{magic or 'no gzip'}, expected gzip"
        with gzip.open(path) as packed:
            head = packed.read(_HEAD)
        magic = next((kind for pattern, kind in _MAGIC if pattern.match(head)), None)
        return None if magic is None and head[:1] in b"{[" else f"{magic or 'something else'} in it, expected JSON"
    if magic is not None and not (name.endswith(".py") and head.startswith(b"#!")):
        return magic
    if name.endswith((".json", ".sig")):
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
    elif not name.endswith(".model") and b"\x00" in path.read_bytes():
        return "no text: it has zero bytes"
    return None
