"""Checks of the files beside the weights: what they say of the model and of its text must be what the source says.

Quantization changes none of it: neither the positions' base and scaling, nor the tokens that end an answer, nor the
template of a conversation, nor a token's number. A checkpoint with the weights of its source and another of these
answers short questions well enough to pass a test, and serves badly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quantmint.pipeline.base.canonical import ABSENT, difference
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.digest import template_digest, tokenizer_digest
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.quantize.inspection.findings import InspectionFinding

CONFIG, GENERATION, TOKENIZER_CONFIG, FAST = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
)  # fmt: skip
_FREE: Final = frozenset(
    ("quantization_config", "compression_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
     "use_cache", "auto_map", "_attn_implementation_autoset", "_from_model_config")
)  # fmt: skip
"""Keys of a configuration that say how the weights are stored, or who wrote the file."""
_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token")
"""Keys of tokenizer_config.json that change the tokens of a text; others change what a library makes of them."""
_MOST = 5


def check_companions(checkpoint: Path, source: Path) -> Iterator[InspectionFinding]:
    """Yield a finding for each difference of configuration, template and tokenizer between two folders.

    Keys that libraries add or leave out when they save a configuration again are compared as transformers reads them.
    """
    yield from _check_config(checkpoint, source)
    yield from _check_generation(checkpoint, source)
    templates = [template_digest(folder) for folder in (source, checkpoint)]
    if templates[0] != templates[1]:
        shown = ["none" if digest is None else f"SHA-256 {digest[:16]}…" for digest in templates]
        message = f"it is {shown[1]}, the source's is {shown[0]}: a conversation would become other tokens"
        yield InspectionFinding("other template", "the chat template", message)
    yield from _check_tokenizer(checkpoint, source)


def _check_config(checkpoint: Path, source: Path) -> Iterator[InspectionFinding]:
    """Yield a finding for each value of config.json that is not the source's."""
    sides = [_without(read_json(folder / CONFIG)) for folder in (source, checkpoint)]
    if sides[0] == sides[1]:
        return
    defaults = [_as_read(folder) for folder in (source, checkpoint)]
    if None not in defaults:
        sides = [_without(side or {}) for side in defaults]
    for change in difference(*sides):
        unread = None in defaults and ABSENT in (change.old, change.new)  # what a library left out may be a default
        if unread or _is_own_head(change.path, change.old, change.new):
            continue
        message = f"it is {_shown(change.new)}, the source has {_shown(change.old)}"
        yield InspectionFinding("other configuration", f"{CONFIG}: {change.path.removeprefix('$.')}", message)


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that are free to differ, in its sections too."""
    items = {key: value for key, value in config.items() if key not in _FREE}
    return {key: _without(value) if isinstance(value, Mapping) else value for key, value in items.items()}


def _as_read(folder: Path) -> dict[str, Any] | None:
    """Return a configuration with transformers' defaults and spellings; None where transformers cannot read it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def _is_own_head(path: str, before: object, after: object) -> bool:
    """Return whether the head only got weights of its own, as a rotation leaves it."""
    return path.endswith("tie_word_embeddings") and before is True and after is False


def _check_generation(checkpoint: Path, source: Path) -> Iterator[InspectionFinding]:
    """Yield a finding for each value of generation_config.json that is not the source's.

    Where the source has no such file, its config.json says which tokens begin and end an answer.
    """
    before, after = (_optional(folder / GENERATION) for folder in (source, checkpoint))
    if after is None:
        if before is not None:
            yield InspectionFinding("other configuration", GENERATION, "it is missing, the source has one")
        return
    if before is None:
        config = read_json(source / CONFIG)
        before = {key: config.get(key) for key in _TOKEN_IDS}
        after = {key: after.get(key, before[key]) for key in _TOKEN_IDS}
    for change in difference(_without(before), _without(after)):
        message = f"it is {_shown(change.new)}, the source has {_shown(change.old)}"
        yield InspectionFinding("other configuration", f"{GENERATION}: {change.path.removeprefix('$.')}", message)


def _check_tokenizer(checkpoint: Path, source: Path) -> Iterator[InspectionFinding]:
    """Yield findings where a text would become other tokens than the source's."""
    first, second = (_optional(folder / TOKENIZER_CONFIG) or {} for folder in (source, checkpoint))
    for key in _TOKENS:
        before, after = (_content(side.get(key)) for side in (first, second))
        if before != after and not (key.startswith("add_") and None in (before, after)):
            message = f"it is {_shown(after)}, the source has {_shown(before)}"
            yield InspectionFinding("other tokenizer", f"{TOKENIZER_CONFIG}: {key}", message)
    if tokenizer_digest(source) == tokenizer_digest(checkpoint):
        return
    before_file, after_file = (_optional(folder / FAST) for folder in (source, checkpoint))
    if before_file is None or after_file is None:
        if before_file is after_file:  # a fast tokenizer may have been made of the slow one's files
            yield InspectionFinding("other tokenizer", "the tokenizer", "its files are not the source's")
        return
    numbers, other_numbers = _numbers(before_file), _numbers(after_file)
    renumbered = [token for token, number in numbers.items() if other_numbers.get(token) != number]
    for token in renumbered[:_MOST]:
        message = f"the token {token!r} is {_shown(other_numbers.get(token, ABSENT))}, the source has {numbers[token]}"
        yield InspectionFinding("other tokenizer", FAST, f"{message} ({len(renumbered)} such tokens)")
    settled, other_settled = _settled(before_file), _settled(after_file)
    if not renumbered and settled != other_settled:
        parts = [key for key in {**settled, **other_settled} if settled.get(key) != other_settled.get(key)]
        yield InspectionFinding("other tokenizer", FAST, f"its {', '.join(parts)} are not the source's")


def _numbers(file: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each token of a tokenizer.json, of its vocabulary and of those that were added."""
    vocabulary = (file.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in file.get("added_tokens") or ()}}


def _settled(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json without how it was last used, with merges in one of the two ways to write them."""
    model = dict(file.get("model") or {})
    if "merges" in model:
        model["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    return {**{key: value for key, value in file.items() if key not in ("truncation", "padding")}, "model": model}


def _optional(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path) if path.is_file() else None
    except UserError:
        return {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _shown(value: object) -> str:
    return "absent" if value is ABSENT or value is None else json.dumps(value, default=str)[:80]
