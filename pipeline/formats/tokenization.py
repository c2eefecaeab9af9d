"""How a model folder turns a conversation into tokens, as two digests: equal ones ask the same question."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pipeline.errors import UserError
from pipeline.formats.checkpoint import read_json

NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates beside the one that is used where none is named."""
_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_FAST = "tokenizer.json"
_SLOW = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_SESSION = ("truncation", "padding")  # how tokenizer.json was last used, and no part of what it does to a text


def template_digest(folder: Path, override: str | None = None) -> str | None:
    """SHA-256 of the chat template, hex; None for a folder without one.

    ``override`` is what a server was told to take in its place: a file, or the template itself.
    """
    template = _template(folder) if override is None else _overriding(override)
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def tokenizer_digest(folder: Path) -> str | None:
    """SHA-256 of what splits text into tokens, hex; None for a folder without a tokenizer.

    Of ``tokenizer.json`` the content counts and not its layout, which libraries change when they save it again.
    """
    if (folder / _FAST).is_file():
        content = {key: value for key, value in read_json(folder / _FAST).items() if key not in _SESSION}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    found = [folder / name for name in _SLOW if (folder / name).is_file()]
    if not found:
        return None
    digest = hashlib.sha256()
    for path in found:
        digest.update(f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _template(folder: Path) -> str | None:
    """The templates of a folder as one text; a file of its own comes before an entry of the configuration."""
    files = [folder / _TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    if texts:
        return "\0".join(texts)
    if not (folder / _CONFIG).is_file():
        return None
    found = read_json(folder / _CONFIG).get("chat_template")
    return found if isinstance(found, str) or found is None else json.dumps(found, sort_keys=True)


def _overriding(override: str) -> str:
    path = Path(override)
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else override
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{override}: the chat template cannot be read: {error}") from None
