"""Read a model's structure from its folder, once for the same configuration, tensors, libraries and code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.base.machine import cache_folder, versions
from quantmint.pipeline.quantize.formats.checkpoint import read_config
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.classifier import TensorClassifier, Tensors
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.store.disk import sha256_of, write_atomic


def read_structure(folder: Path, tensors: Tensors, *, trust_remote_code: bool = False) -> Structure:
    """Read a model's structure from the folder's ``config.json`` and from the ``tensors`` that are on disk.

    Without ``trust_remote_code`` the result is cached on disk. Raises `UserError` where transformers cannot build the
    model, and for encoded tensors without their scales.
    """
    config = read_config(folder)
    place = None if trust_remote_code else _cache_file(config, tensors)
    if place is not None:
        with suppress(OSError, ValueError):  # it was never asked, or by another version
            return TypeAdapter(Structure).validate_json(place.read_bytes())
    structure = TensorClassifier(meta_model(folder, trust_remote_code=trust_remote_code), config, tensors).structure()
    if place is not None:
        with suppress(OSError, StoreError):  # a cache that cannot be written is none
            place.parent.mkdir(parents=True, exist_ok=True)
            data = json.dumps(asdict(structure)).encode()
            write_atomic(place, data, temporary=place.with_name(f"{place.name}.{os.getpid()}.partial"))
    return structure


def _cache_file(config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Return the path of a model's cached structure: reading one anew takes seconds, to import transformers.

    The name follows from everything that decides the answer: the configuration, the tensors on disk, the versions of
    the libraries, and the code that asks them. A model's own Python code could answer otherwise tomorrow, so its
    structures are never cached.
    """
    stored = [[info.name, info.dtype, list(info.shape)] for _, info in tensors.values()]
    key = fingerprint([json.dumps(config, sort_keys=True), stored, versions("torch", "transformers"), _code()])
    return cache_folder() / "structures" / f"{key}.json"


@cache
def _code() -> list[str]:
    """Return the SHA-256 of each module and table that a structure depends on."""
    root = Path(__file__).parents[3]
    files = [*Path(__file__).parent.rglob("*.py"), *Path(__file__).parent.rglob("*.yaml")]
    names = ("replica", "elements", "decoders", "encodings", "classes", "calls", "parts")
    files += [root / "calibration" / f"{name}.py" for name in names]
    files += [root / "pipeline" / "quantize" / "formats" / "checkpoint.py", root / "pipeline" / "recipe" / "modules.py"]
    return [sha256_of(path) for path in sorted(files)]
