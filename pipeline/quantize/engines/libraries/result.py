"""Bring a library's checkpoint into our form and compare it with the job.

A library names modules as transformers' model does; `adopt` gives tensors and configuration the names that the source
has, which are those that servers load. `differences` is then the same proof for every library: our own formats read
the checkpoint back, and nothing that it declares is taken on trust.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmint.calibration.replica import Renaming
from quantmint.pipeline.quantize.engines.algorithms import RECIPE, recorded_algorithms
from quantmint.pipeline.quantize.formats.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    encode_header,
    open_checkpoint,
    read_header,
)
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import layout, layout_of
from quantmint.pipeline.quantize.inspection.findings import check_structure
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.structure import Structure

_COPY = 16 << 20  # bytes at a time


@dataclass(frozen=True, slots=True)
class Names:
    """Maps names of transformers' model to names in the source, for ``modules`` and for whole ``tensors``."""

    modules: Mapping[str, str]
    tensors: Mapping[str, str]

    def tensor(self, name: str) -> str:
        """Return the name in the source of a tensor that a library wrote; the same name where its module is unknown."""
        if name in self.tensors:
            return self.tensors[name]
        module, _, role = name.rpartition(".")
        return f"{self.modules.get(module, module)}.{role}"

    def configuration(self, value: Any) -> Any:
        """Return a ``quantization_config``, or a part of it, with exact module names translated; patterns stay."""
        if isinstance(value, Mapping):
            return {self.modules.get(key, key): self.configuration(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.configuration(entry) for entry in value]
        return self.modules.get(value, value) if isinstance(value, str) else value


def names_on_disk(source: Checkpoint, structure: Structure, *, trust_remote_code: bool = False) -> Names:
    """Return the source's names of a model's modules, and of the tensors that are carried over unquantized.

    Raises `UserError` where transformers cannot build the model.
    """
    rename = Renaming(meta_model(source.folder, trust_remote_code=trust_remote_code))
    tensors = {rename(name)[0]: name for name in source.tensors}
    modules = {model_name.removesuffix(".weight"): name.removesuffix(".weight") for model_name, name in tensors.items()}
    model_name = {inside: module for module, inside in structure.modules.items()}
    quantized = {weight.tensor for module, weight in structure.weights.items() if module not in structure.head}
    return Names({**modules, **model_name}, {inside: name for inside, name in tensors.items() if name not in quantized})


def adopt(written: Path, destination: Path, names: Names, source: Checkpoint, choice: Choice, form: str) -> None:
    """Move the checkpoint that a library wrote in ``written`` to ``destination``, with the names of the source.

    ``destination`` must not exist. Only files with names to change are rewritten; the others are moved. ``config.json``
    is the source's with the library's ``quantization_config``, in which the modules that stay in 16 bit are listed one
    by one. ``form`` is the checkpoint format. Raises `UserError` where ``written`` holds no readable checkpoint.
    """
    checkpoint = open_checkpoint(written)
    destination.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in checkpoint.shards:
        _move_shard(written / shard, destination / shard, names)
        weight_map |= {names.tensor(info.name): shard for info in checkpoint.in_shard(shard)}
    if (written / INDEX_NAME).is_file():
        index = {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write(destination / INDEX_NAME, index)
    if (written / RECIPE).is_file():
        shutil.copyfile(written / RECIPE, destination / RECIPE)
    _write(destination / "config.json", _config(checkpoint.config, names, source, choice, form))


def _config(
    written: Mapping[str, Any], names: Names, source: Checkpoint, choice: Choice, form: str
) -> Mapping[str, Any]:
    declared: dict[str, Any] = names.configuration(written.get("quantization_config") or {})
    expected = layout(form).quantization_config(choice)
    for key in ("ignore", "exclude"):
        if key in declared and key in expected:
            declared[key] = expected[key]
    # A rotated embedding and its head are no longer the same matrix.
    tied = {key: written[key] for key in ("tie_word_embeddings",) if key in source.config and key in written}
    return {**source.config, **tied, "quantization_config": declared}


def _move_shard(path: Path, destination: Path, names: Names) -> None:
    header = read_header(path)
    if all(names.tensor(name) == name for name in header):
        path.replace(destination)
        return
    infos = sorted(header.values(), key=lambda info: info.start)
    with path.open("rb") as old, destination.open("wb") as new:
        new.write(encode_header((names.tensor(info.name), info.dtype, info.shape) for info in infos))
        old.seek(min(info.start for info in infos))
        shutil.copyfileobj(old, new, _COPY)
        new.flush()
        os.fsync(new.fileno())
    path.unlink()


def differences(
    checkpoint: Checkpoint,
    source: Checkpoint,
    structure: Structure,
    choice: Choice,
    *,
    checkpoint_format: str,
    algorithm_name: str,
) -> Iterator[str]:
    """Yield each difference between a checkpoint and the choice that was asked for, as a clause.

    ``structure`` is the source's. Raises `UserError` for a checkpoint without a known ``quantization_config``.
    """
    form = layout_of(checkpoint.config)
    if form.name != checkpoint_format:
        yield f"it is in {form.name}, asked for was {checkpoint_format}"
        return
    modules = [*structure.linear, *structure.kept]
    claims = form.claims(checkpoint.config["quantization_config"], modules)
    for module in modules:
        declared, asked_for = claims.schemes[module] or claims.unknown.get(module), choice.schemes.get(module)
        if declared != asked_for:
            yield f"{module} is declared as {declared or '16 bit'}, asked for was {asked_for or '16 bit'}"
    if claims.kv_cache != choice.kv_cache:
        cache = "an FP8" if claims.kv_cache else "no FP8"
        yield f"it declares {cache} KV cache, asked for was {'one' if choice.kv_cache else 'none'}"
    recorded = recorded_algorithms(checkpoint)
    if recorded != (() if algorithm_name == "none" else (algorithm_name,)):
        yield f"it records {' and '.join(recorded) or 'no algorithm'}, asked for was {algorithm_name}"
    for finding in check_structure(checkpoint, structure, claims):
        yield f"{finding.rule}: {finding.where}: {finding.message}"
    yield from _carried(checkpoint, source, structure, choice)


def _carried(checkpoint: Checkpoint, source: Checkpoint, structure: Structure, choice: Choice) -> Iterator[str]:
    """Yield a clause for each carried 16-bit tensor that the checkpoint lacks, or has in another dtype or shape."""
    quantized = {structure.weights[module].tensor for module in choice.schemes if module in structure.weights}
    for name, (_, info) in source.tensors.items():
        if name in quantized or name in structure.decoded_away:
            continue
        if name not in checkpoint.tensors:
            yield f"missing: {name}: the source has it, the checkpoint does not"
        elif (stored := checkpoint.tensors[name][1]).dtype != info.dtype or stored.shape != info.shape:
            expected = f"{info.dtype} {list(info.shape)}"
            yield f"altered: {name}: it is {stored.dtype} {list(stored.shape)}, expected {expected}"


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
