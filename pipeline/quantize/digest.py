"""Digests of a model folder: of all its files, and of how it turns a conversation into tokens.

A 140 GB folder is read once: a file whose size, times and inode are those that were seen before keeps its digest. (The
time of change too, which no program can set: a modification time may be put back.) The memory is a file in the store;
losing it costs one reading. Equal digests of template and tokenizer ask the same question.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, read_json
from quantmint.pipeline.store.disk import sha256_of, write_atomic

NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates beside the one that is used where none is named."""
_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_FAST = "tokenizer.json"
_SLOW = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_SESSION = ("truncation", "padding")  # how tokenizer.json was last used, and no part of what it does to a text


def template_digest(folder: Path, override: str | None = None) -> str | None:
    """Return the SHA-256 of a folder's chat template, hex; None for a folder without one.

    ``override`` is the template that a server is told to use instead: a file, or the template itself. Raises
    `UserError` where that file, or a configuration, cannot be read.
    """
    template = chat_template(folder, override)
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def chat_template(folder: Path, override: str | None = None) -> str | None:
    """Return a folder's chat template, or the one in ``override``; several are joined, None without one.

    Raises as `template_digest` does.
    """
    return _template(folder) if override is None else _overriding(override)


def tokenizer_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a folder's tokenizer files, hex; None for a folder without a tokenizer.

    Of ``tokenizer.json`` the content counts and not the layout, which libraries change when they save it again. Raises
    `UserError` where that is not a JSON object.
    """
    if (folder / _FAST).is_file():
        content = {key: value for key, value in read_json(folder / _FAST).items() if key not in _SESSION}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    files = [folder / name for name in _SLOW if (folder / name).is_file()]
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _template(folder: Path) -> str | None:
    """Return a folder's chat templates as one text; files come before the entry in the tokenizer's configuration."""
    files = [folder / _TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    if texts:
        return "\0".join(texts)
    if not (folder / _CONFIG).is_file():
        return None
    template = read_json(folder / _CONFIG).get("chat_template")
    return template if isinstance(template, str) or template is None else json.dumps(template, sort_keys=True)


def _overriding(override: str) -> str:
    path = Path(override)
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else override
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{override}: the chat template cannot be read: {error}") from None


# What makes a model: nothing hidden, no caches, no pickled weights.
COMPANION_FILES = (
    "*.json", "*.txt", "*.model", "*.jinja", f"{NAMED_TEMPLATES}/*.jinja", "*.tiktoken",
    "LICENSE*", "LICENCE*", "NOTICE*", "Notice*", "USE_POLICY*",
)  # fmt: skip
MODEL_FILES = ("*.safetensors", *COMPANION_FILES, "*.py")
_MEMORY = "file-digests.json"
_WORDS = ("config", "token", "vocab", "merges", "template", "processor", "licen", "notice", "use_policy", "quantize")
"""Words in the names of JSON and text files that belong to a model."""
_NAMES = frozenset({"tekken.json", "params.json", "modules.json", "spiece.json", "index.json", INDEX_NAME})
# What the weights are described by; an adapter that was merged into them would be applied a second time.
_DESCRIPTIONS = frozenset({"config.json", INDEX_NAME, "adapter_config.json", "hf_quant_config.json"})


def model_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the files in a folder that belong to a model, sorted."""
    return _matching(folder, MODEL_FILES)


def _matching(folder: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths of the files in a folder that match any of some patterns, sorted."""
    return tuple(sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}))


def stray_files(source: Path) -> tuple[str, ...]:
    """Return the names of JSON and text files beside a model that are none of its own, such as somebody's data."""
    return tuple(path.name for path in _matching(source, COMPANION_FILES) if _is_stray(path))


def _is_stray(path: Path) -> bool:
    """Whether a JSON or text file is none that tokenizers, processors or servers look for; others never are."""
    name = path.name.lower()
    return path.suffix in (".json", ".txt") and name not in _NAMES and not any(word in name for word in _WORDS)


def companions(source: Path, destination: Path, *, with_code: bool) -> dict[Path, Path]:
    """Map where each tokenizer, chat template and licence file of ``source`` belongs in ``destination`` to that file.

    Subfolders of ``destination`` are created. Python files are included only ``with_code``; config.json, the index of
    weights, an adapter's configuration and `stray_files` never are.
    """
    patterns = (*COMPANION_FILES, "*.py") if with_code else COMPANION_FILES
    sources: dict[Path, Path] = {}
    for path in _matching(source, patterns):
        if path.name not in _DESCRIPTIONS and not _is_stray(path):
            sources[destination / path.relative_to(source)] = path
    for copy in sources:
        copy.parent.mkdir(exist_ok=True)
    return sources


def file_digests(
    folder: Path, memory: Path, *, advance: Callable[[int], None] = lambda _: None
) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the SHA-256, hex, of each file of a model folder, by its path below the folder.

    Digests of unchanged files are remembered below ``memory``, the store's root. ``advance`` gets the bytes of each
    file. Raises `UserError` for a folder that is not there or holds no model.
    """
    files = model_files(folder) if folder.is_dir() else ()
    if not files:
        raise UserError(f"{folder}: no such folder, or no model files in it.")
    store = memory / _MEMORY
    remembered = _remembered(store)
    digests: dict[str, tuple[int, str]] = {}
    fresh: dict[str, str] = {}
    for path in files:
        status = path.stat()
        mark = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"
        digest = remembered.get(mark) or sha256_of(path)
        fresh[mark] = digest
        digests[path.relative_to(folder).as_posix()] = (status.st_size, digest)
        advance(status.st_size)
    if fresh.items() - remembered.items():
        _remember(store, {**remembered, **fresh})
    return digests


def folder_digest(digests: dict[str, tuple[int, str]]) -> str:
    """Return one SHA-256, hex, over the names, sizes and digests of a folder's files (`file_digests`)."""
    return fingerprint([[name, size, digest] for name, (size, digest) in sorted(digests.items())])


def _remembered(store: Path) -> dict[str, str]:
    try:
        memory = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(store: Path, digests: dict[str, str]) -> None:
    """Write the digests to the file ``store``; an error is ignored, as the next required write reports it."""
    with suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        partial = store.with_name(f"{_MEMORY}.{os.getpid()}.partial")
        write_atomic(store, json.dumps(digests, indent=0).encode(), temporary=partial)
