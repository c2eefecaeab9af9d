"""Answers about the structure of models, kept in the user's cache: asking takes the import of transformers, seconds.

An answer is found by everything that it follows from: the configuration, the tensors on disk by name, dtype and shape,
the versions of the libraries that were asked, and the code here that asked them. A model's own Python code could answer
otherwise tomorrow, so its answers are never kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.base.canonical import fingerprint
from pipeline.base.errors import StoreError
from pipeline.base.machine import cache_folder, versions
from pipeline.quantize.formats.checkpoint import TensorInfo
from pipeline.quantize.model.weights import Structure, WeightSource
from pipeline.store.disk import sha256_of, write_atomic


def place_of(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> Path:
    """Where the answer for a model is kept, whether it is there or not."""
    code = [sha256_of(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    stored = [[info.name, info.dtype, list(info.shape)] for info in tensors]
    key = fingerprint([json.dumps(config, sort_keys=True), stored, versions("torch", "transformers"), code])
    return cache_folder() / "structures" / f"{key}.json"


def recall(place: Path) -> Structure | None:
    """The structure that was found before; None where it was not, or cannot be read."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        weights = {
            module: WeightSource(**{**weight, "rows": weight["rows"] and tuple(weight["rows"])})
            for module, weight in found.pop("weights").items()
        }
        linear = {module: (shape[0], shape[1]) for module, shape in found.pop("linear").items()}
        kept, attention = tuple(found.pop("kept")), tuple(found.pop("attention"))
        faults = tuple((rule, name, message) for rule, name, message in found.pop("faults"))
        return Structure(linear=linear, kept=kept, attention=attention, weights=weights, faults=faults, **found)
    except (OSError, ValueError, TypeError, KeyError, LookupError, AttributeError):
        return None


def remember(place: Path, structure: Structure) -> None:
    """Keep an answer; a cache that cannot be written is none."""
    with suppress(OSError, StoreError):
        place.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(asdict(structure)).encode()
        write_atomic(place, data, temporary=place.with_name(f"{place.name}.{os.getpid()}.partial"))
