"""Read the modules of a class of vLLM, the parameter that each tensor on disk reaches, and the renames between them."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERBOSE = bool(os.environ.get("VERBOSE"))
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_EXPERTS = frozenset(("FusedMoE", "RoutedExperts"))
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_INTERLEAVED = ("gpt_oss",)  # model types of which the rows of gate and up alternate, in one matrix
Rows = list[list[str | None]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Reading:
    """Facts about one class of vLLM. Names have `*` for numbers, except those of ``renames``."""

    quantized: set[str] = field(default_factory=set)
    unquantized: set[str] = field(default_factory=set)
    absorbed: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    packed: dict[str, list[str]] = field(default_factory=dict)  # packed_modules_mapping of the quantization
    prefixes: dict[str, str] = field(default_factory=dict)  # quantized module: the name under which it asks
    loads: dict[str, str] = field(default_factory=dict)  # module on disk: module of vLLM; "" for none
    shards: dict[str, str] = field(default_factory=dict)  # module on disk: its shard of a fused module
    renames: Rows = field(default_factory=list)
    listed: Rows = field(default_factory=list)
    new_names: dict[str, str | None] = field(default_factory=dict)  # module on disk: its name after the renames
    drafter: str | None = None
    place: str | None = None  # of a drafter's modules on disk
    generic: bool = False  # whether vLLM has no class of its own, and runs transformers'

    def modules_on_disk(self) -> dict[str, list[str]]:
        """Return the modules on disk that each module of vLLM is loaded from."""
        groups: dict[str, list[str]] = defaultdict(list)
        for module, target in sorted(self.loads.items()):
            if target:
                groups[target].append(module)
        return groups


def pattern(name: str) -> str:
    """Return a module's name with `*` for the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def parent(name: str) -> str:
    """Return a module's name without its last part."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def classes(module: Any) -> frozenset[str]:
    """Return the names of a module's class and its bases; versions of vLLM keep classes in different files."""
    return frozenset(base.__name__ for base in type(module).__mro__)


def reason(error: Exception) -> str:
    """Return an error's class and message in one line; with VERBOSE also print its traceback."""
    if VERBOSE:
        traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def read_modules(model: Any, recorder: Any) -> tuple[Reading, dict[int, str]]:
    """Sort the modules of a model; also return the module that owns each parameter, by the parameter's id."""
    reading, owners, names = Reading(), {}, {}
    reading.generic = type(model).__name__.startswith("Transformers")
    reading.packed = {name: list(parts) for name, parts in recorder.packed_modules_mapping.items()}
    for path, module in _modules(model):
        kinds = classes(module)
        name = names[id(module)] = pattern(path.removesuffix(".routed_experts") if kinds & _EXPERTS else path)
        parameters = list(module.parameters(recurse=False))
        owners.update({id(parameter): name for parameter in parameters if id(parameter) not in owners})
        if not any(parameter.ndim >= 2 for parameter in parameters):
            continue
        if id(module) in recorder.prefixes and kinds & {"LinearBase", *_EXPERTS}:
            reading.quantized.add(name)
            reading.prefixes[name] = pattern(recorder.prefixes[id(module)])
        else:
            reading.unquantized.add(name)
        if kinds & _EXPERTS:
            reading.experts.add(name)
    for module in model.modules():
        if "MLAAttention" in classes(module) and getattr(module, "kv_b_proj", None) is not None:
            reading.absorbed.add(names[id(module.kv_b_proj)])
    reading.quantized -= reading.unquantized  # of layers of two kinds
    return reading, owners


def _modules(model: Any) -> list[tuple[str, Any]]:
    """Return each module of a model with the shortest of its paths: a router is its layer's, and its experts' too."""
    paths: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in paths or path.count(".") < paths[id(module)][0].count("."):
            paths[id(module)] = (path, module)
    return list(paths.values())


def trace(model: Any, owners: Mapping[int, str], shapes: Shapes, reading: Reading) -> None:
    """Give each tensor to the model's `load_weights`, and note in ``reading`` which module it reaches."""
    import torch

    hits: list[tuple[int, str]] = []

    def recorder(parameter: int) -> Callable[..., bool]:
        def load(*positional: Any, **named: Any) -> bool:
            shard = named.get("shard_id", named.get("loaded_shard_id", positional[2] if len(positional) == 3 else ""))
            hits.append((parameter, str(shard)))
            return True

        return load

    for parameter in model.parameters():
        parameter.weight_loader = recorder(id(parameter))
    for name, shape in shapes.items():
        module = pattern(name.removesuffix(".weight"))
        hits.clear()
        try:
            model.load_weights(iter([(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"))]))
        except Exception as error:  # most want the whole checkpoint, and complain after this tensor has been loaded
            if VERBOSE and not hits:
                sys.stderr.write(f"    {name} reaches no parameter: {error!r:.160}\n")
        targets = {owners[parameter]: shard for parameter, shard in hits if parameter in owners}
        if targets:
            reading.loads[module], reading.shards[module] = next(iter(targets.items()))
        reading.loads.setdefault(module, "")


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the matrices of a checkpoint, and of the single experts that its stacks hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {
            name: tuple(info["shape"])
            for name, info in header.items()
            if name != "__metadata__" and len(info["shape"]) >= 2
        }
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    for name, shape in list(shapes.items()):
        stack = name.removesuffix(".weight")
        if len(shape) == 3 and last(stack) in _STACKS:
            for part in _STACKS[last(stack)] if model_type not in _INTERLEAVED else (last(stack),):
                shapes[f"{parent(stack)}.0.{part}.weight"] = shape[1:]
    return {name: shape for name, shape in shapes.items() if name.endswith(".weight")}


_KINDS = (("regex", "regex"), ("text", "substr"), ("prefix", "prefix"), ("suffix", "suffix"))  # in vLLM's order


def _rows(mapper: Any, path: str = "") -> Rows:
    """Return a WeightsMapper as rows of the table; ``path`` is the part of the model whose names it renames."""
    return [
        [kind, getattr(source, "pattern", source), target, *([pattern(path)] if path else [])]
        for kind, attribute in _KINDS
        for source, target in getattr(mapper, f"orig_to_new_{attribute}", {}).items()
    ]


def rename(name: str, rows: Rows) -> str | None:
    """Apply rows to the name of a module on disk as the table's reader does; None where one drops it."""
    current = f"{name}.weight"
    for kind, source, target, *within in rows:
        opening = re.match(re.escape(f"{within[0]}.").replace(r"\*", r"\d+"), current) if within else None
        if within and not opening:
            continue
        start = opening[0] if opening else ""
        rest = current[len(start) :]
        assert source is not None
        hit = {
            "regex": re.search(source, rest) if kind == "regex" else None,
            "text": source in rest,
            "prefix": rest.startswith(source),
            "suffix": rest.endswith(source),
        }[str(kind)]
        if hit and target is None:
            return None
        if hit and target is not None:
            if kind == "regex":
                rest = re.sub(source, target, rest)
            elif kind == "suffix":
                rest = rest.removesuffix(source) + target
            else:
                rest = rest.replace(source, target, 1)
        current = start + rest
    return current.removesuffix(".weight")


def choose_renames(model: Any, recorder: Any, reading: Reading, shapes: Iterable[str]) -> None:
    """Choose the renames that lead the names on disk nearest to their modules: the model's own, or its parts' too."""
    mappers: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        if mapper is not None and all(_rows(mapper) != _rows(other) for _, other in mappers):
            mappers.append((path, mapper))
    modules = reading.quantized | reading.unquantized
    parents = {parent(module) for module in modules}
    names = [name.removesuffix(".weight") for name in shapes]

    def agreement(rows: Rows) -> int:
        renamed = [pattern(rename(name, rows) or "") for name in names]
        return sum((name in modules) + (parent(name) in parents) for name in renamed)

    everything = [row for path, mapper in mappers for row in _rows(mapper, path)]
    outer = [row for path, mapper in mappers if not path for row in _rows(mapper)]
    reading.renames = max((outer, everything, []), key=agreement)
    reading.listed = [row for mapper in recorder.mappers for row in _rows(mapper)]
    for name in names:
        new_name = rename(name, reading.renames)
        reading.new_names[pattern(name)] = None if new_name is None else pattern(new_name)
