"""The words for what computes an answer, as a verdict names it."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.engines.stream.kernels import MX_GROUP
from pipeline.schemes import ActivationFormat
from pipeline.schemes import scheme as row_of
from pipeline.versions import versions

_NAMES = {"e4m3": "FP8", "int8": "INT8", "e2m1": "FP4", "e2m3": "FP6", "e3m2": "FP6"}


def reference_version() -> str:
    """The library that computes, with its version: "transformers 5.17.0"."""
    return f"transformers {versions('transformers')['transformers']}"


def runtime_words(schemes: Iterable[str], *, fp8_cache: bool) -> str:
    """What is computed with, of a checkpoint with these schemes; without one it is in 16 bit."""
    rows = [row_of(scheme) for scheme in schemes]
    kinds = list(dict.fromkeys(_kind(row.activations) for row in rows if row.activations.kind != "none"))
    words = [f"{reference_version()} in float32", "dequantized weights" if rows else "16-bit weights"]
    if kinds:
        words.append(f"simulated {' and '.join(kinds)} activations")
    if fp8_cache:
        words.append("FP8 KV cache")
    return ", ".join(words)


def _kind(activations: ActivationFormat) -> str:
    name = _NAMES[activations.dtype or ""]
    return f"MX{name}" if activations.group == MX_GROUP else name
