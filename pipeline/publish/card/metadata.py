"""The front matter of a card, made and read back by the Hub client's own classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pipeline.errors import StageError
from pipeline.publish.card.facts import Base, CardFacts

TYPES: Final = {"e4m3": "fp8", "e2m1": "mxfp4", "e2m3": "mxfp6", "e3m2": "mxfp6", "int8": "int8", "int4": "int4"}
"""Tag of a type of weights; of the schemes with groups and e4m3, mxfp8."""
_TAG: Final = re.compile(r"\w[\w .+/-]{0,63}")  # with a colon are those that the Hub makes itself: region:us, arxiv:...
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?|code|multilingual")
_REPO: Final = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_LIBRARY: Final = "transformers"
_TEXT, _PICTURES = "text-generation", "image-text-to-text"
#: Tags of the base that speak of its files, or of services that run them: no longer true of these.
_GONE: Final = frozenset(
    (
        "pytorch", "tf", "jax", "flax", "onnx", "gguf", "ggml", "openvino", "mlx", "safetensors", "bf16", "bfloat16",
        "fp16", "float16", "fp32", "fp8", "int8", "unsloth", "text-generation-inference", "endpoints_compatible",
        "autotrain_compatible",
    )
)  # fmt: skip


def front_matter(facts: CardFacts) -> str:
    """The YAML between the two lines of dashes, those included.

    Raises `StageError` where the Hub's classes do not read back what was written.
    """
    from huggingface_hub import ModelCard, ModelCardData

    fields = metadata(facts)
    text = f"---\n{ModelCardData(**fields).to_yaml()}\n---\n"
    read = ModelCard(text).data.to_dict()
    if read != fields:
        differing = sorted(key for key in {*read, *fields} if read.get(key) != fields.get(key))
        raise StageError(f"the card's metadata does not survive the Hub's own classes: {', '.join(differing)}")
    return text


def metadata(facts: CardFacts) -> dict[str, Any]:
    """The fields, without those that have no value. Of a folder's base nothing on the Hub can be named."""
    terms, base, own = facts.terms, facts.base, facts.base.metadata
    texts = facts.made.calibration
    # The Hub shows a name and a link beside "other" only; a link is also given where the terms ask to be read.
    linked = terms.link if terms.id == "other" or terms.acceptance else None
    fields: dict[str, Any] = {
        "base_model": [base.repo] if base.repo else None,
        "base_model_relation": "quantized" if base.repo else None,
        "license": terms.id,
        "license_name": terms.hub_name,
        "license_link": linked,
        "library_name": _word(own.get("library_name")) or _LIBRARY,
        "pipeline_tag": _word(own.get("pipeline_tag")) or _pipeline_tag(base),
        "language": list(_words(own.get("language"), _LANGUAGE)),
        "tags": list(_tags(facts)),
        "datasets": list(_words(texts.dataset, _REPO)) if texts is not None else None,
    }
    return {key: value for key, value in fields.items() if value}


def _tags(facts: CardFacts) -> Iterator[str]:
    """Ours, then those of the base that still hold, each once."""
    made = facts.made
    kind = TYPES.get(made.weights, made.weights)
    ours = ["mxfp8" if made.scheme == "mxfp8" else kind, "ptpc" if made.scheme.startswith("ptpc") else "",
            made.algorithm if made.algorithm != "none" else "", made.format, "vllm", "quantmint"]  # fmt: skip
    seen: set[str] = set()
    for tag in (*ours, *_words(facts.base.metadata.get("tags"))):
        if tag and tag.lower() not in seen and (tag in ours or tag.lower() not in _GONE):
            seen.add(tag.lower())
            yield tag


def _pipeline_tag(base: Base) -> str | None:
    if base.pictures and base.architecture.endswith("ForConditionalGeneration"):
        return _PICTURES
    return _TEXT if base.architecture.endswith("ForCausalLM") else None


def _word(value: object) -> str | None:
    return next(_words(value if isinstance(value, str) else None, _NAME), None)


def _words(value: object, form: re.Pattern[str] = _TAG) -> Iterator[str]:
    """A card may say one or a list; what has not the form of such a word is left out.

    YAML reads the language `no` as false.
    """
    items: Iterable[object] = value if isinstance(value, list) else [value]
    for item in items:
        word = "no" if item is False else item.strip() if isinstance(item, str) else ""
        if form.fullmatch(word):
            yield word
