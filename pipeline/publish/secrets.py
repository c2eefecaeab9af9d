"""What must not be read by others: tokens, keys and passwords in the texts of a release.

>>> findings({"quantmint/report.html": page})
(Secret(file='quantmint/report.html', line=214, kind='Hugging Face token'),)

A finding says where and of which kind, never what. The detectors are those of detect-secrets that look for the form of
a credential, without its verification over the network, which would send it away; ours for what it does not know; and
the values of this process's own credentials, whatever they look like. Detectors of high entropy are left out: a release
is full of digests. A vocabulary holds every word that there is, so it is searched only for what cannot be a word.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Final

from pipeline.errors import StageError
from pipeline.publish.credentials import LONGEST, Detector, Scope, detectors, exactly

_WINDOW = 1 << 20  # bytes; read and searched at once, whatever the length of a line
_LONGEST_TEXT: Final = 1 << 32  # bytes; a text that is longer was made to keep a reader busy
_BEFORE = 2  # characters before a match that say whether it stands alone
_VOCABULARY = re.compile(
    r"(tokenizer|vocab|added_tokens|special_tokens_map|merges).*\.(json|txt)|.*\.(model|tiktoken|safetensors)"
)
_PROSE = re.compile(r".*\.(ya?ml|md)")


@dataclass(frozen=True, slots=True, order=True)
class Secret:
    """Where something stands that others must not read, and of which kind it is; never what."""

    file: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}"


def findings(files: Mapping[str, Path], environment: Mapping[str, str] | None = None) -> tuple[Secret, ...]:
    """The credentials in these files, by their names in the release; each line and kind once.

    Of weights the header is read, which has room for any text; what is compressed is searched as it would be unpacked.
    ``environment`` has variables whose values are looked for too (None: this process's, and the Hub's stored token).
    Raises `StageError` for a file that cannot be read.
    """
    return _found(files, detectors(environment))


def private_paths(files: Mapping[str, Path], home: Path | None = None) -> tuple[Secret, ...]:
    """Lines that name a path in somebody's home folder (None: this user's). It is no secret, but says who made it."""
    folder = str(home or Path.home()).rstrip("/")
    if folder in ("", "/root"):
        return ()  # says nothing about anybody
    return _found(files, (exactly("path in a home folder", f"{folder}/"),))


def _found(files: Mapping[str, Path], known: Sequence[Detector]) -> tuple[Secret, ...]:
    found: set[Secret] = set()
    for name, path in files.items():
        wanted = _scopes(name)
        asked = [detector for detector in known if detector.scope in wanted]
        try:
            with _opened(name, path) as file:
                found.update(Secret(name, line, kind) for line, kind in _search(file, asked))
        except (OSError, EOFError, zlib.error) as error:
            raise StageError(f"{path} cannot be searched for secrets: {error}") from error
    return tuple(sorted(found))


def _scopes(name: str) -> tuple[Scope, ...]:
    base = name.rpartition("/")[2]
    if _VOCABULARY.fullmatch(base) and base != "tokenizer_config.json":
        return ("everything",)
    return ("everything", "texts", "prose") if _PROSE.fullmatch(base) else ("everything", "texts")


@contextmanager
def _opened(name: str, path: Path) -> Iterator[BufferedIOBase]:
    with path.open("rb") as file:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        elif name.endswith(".safetensors"):
            size = file.read(8)
            yield BytesIO(file.read(struct.unpack("<Q", size)[0] % _LONGEST_TEXT if len(size) == 8 else 0))
        else:
            yield file


def _search(file: BufferedIOBase, known: Sequence[Detector]) -> Iterator[tuple[int, str]]:
    """Line and kind of each match, with no more than two windows in memory.

    A window ends with what the next one begins with, so that a match is whole in one of them; one byte is one
    character, so that no bytes are refused and places are exact.
    """
    text, line, read = "", 1, 0
    while True:
        chunk = file.read(_WINDOW)
        read += len(chunk)
        text += chunk.decode("latin-1")
        first, last = (_BEFORE if read > len(text) else 0), len(text) - (LONGEST if chunk else 0)
        lowered = text.lower()
        for detector in known:
            if any(anchor in lowered for anchor in detector.anchors):
                for start, _ in detector.places(text):
                    if first <= start < last:
                        yield line + text.count("\n", 0, start), detector.kind
        if not chunk:
            return
        if read > _LONGEST_TEXT:
            yield line, "more text than can be searched"
            return
        kept = max(0, last - _BEFORE)
        line += text.count("\n", 0, kept)
        text = text[kept:]
