"""Table of how vLLM builds and loads each architecture, read from its own classes, which are built without weights.

    .venv/bin/python -m tests.tools.vllm_loaders                         # all models of tests/zoo
    .venv/bin/python -m tests.tools.vllm_loaders llama jamba             # replace the rows of these
    .venv/bin/python -m tests.tools.vllm_loaders --python OTHER/bin/python

The first part, in quantmint's environment, writes the zoo's models to a temporary folder. The second, in vLLM's, writes
``pipeline/quantize/model/loaders/vllm-X.Y.yaml``; it imports nothing of quantmint, and runs alone as

    .venv-vllm/bin/python tests/tools/vllm_loaders.py --folders FOLDER...

A class is built on the meta device, as on an Instinct GPU, with a quantization that records which module asks it for a
method, and under which name. Then each tensor of the checkpoint goes through the class's own ``load_weights``, whose
last step, the ``weight_loader`` of a parameter, records which parameter the tensor reaches. No code of a model is
interpreted, and no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.tools.vllm_builder import Builder

for _variable, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_variable, _value)

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "tests" / "zoo" / "releases.yaml"
LOADERS = ROOT / "pipeline" / "quantize" / "model" / "loaders"
VERBOSE = bool(os.environ.get("VERBOSE"))
HEADER = """\
# How vLLM {version} builds and loads each architecture. Written by tests/tools/vllm_loaders.py; read by ../loader.py.
# Names are vLLM's unless said otherwise; * stands for the number of a layer or an expert.
#   quantized    modules that ask for a quantization
#   unquantized  modules with a matrix that never ask, and heads and embeddings
#   absorbed     projections that latent attention multiplies into its neighbours, in 16 bit
#   experts      containers of routed experts, with the last names of an expert's projections on disk
#   fused        module, or its last name: the modules on disk that it is loaded from, by last name or whole
#   unlisted     fused modules that a quantization's lists must call by vLLM's name
#   renames      kind, text on disk, text in vLLM and, where it holds for a part, that part; null: vLLM skips the tensor
#   listed       renames that a quantization's lists of names go through, where others than the tensors'
#   moves        what load_weights renames after that: beginnings of names
#   prefixes     names under which modules ask, where not their own: beginnings of names
#   skipped      modules on disk that vLLM does not load
#   drafter      class that serves the layers for multi-token prediction
#   generic      whether vLLM has no class of its own, and runs transformers' in its Transformers backend
#   place        of a drafter: beginning of its modules' names on disk; model: the layers after the model's last
"""

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


# ------------------------------------------------------------------------------------------------- reading a model


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


# ---------------------------------------------------------------------------------------------------------- renames

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


# --------------------------------------------------------------------------------------------------------- drafters

_PREDICTED = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
# Where releases keep a layer for multi-token prediction.
_PLACES = ("model.layers.{0}", "mtp.layers.0", "model.mtp_layers.0", "mtp.0", "model.mtp_block.0", "model.mtp.layers.0")


def read_drafter(
    builder: Builder, scratch: Path, config: Mapping[str, Any], target: Reading
) -> tuple[str, Reading] | None:
    """Build the class for multi-token prediction, and find by trial which names of modules on disk it loads.

    transformers leaves those layers out, so no checkpoint of the zoo has them.
    """
    predicted = {**_fields(config["architectures"][0]), **_PREDICTED}
    if "text_config" in config:
        predicted["text_config"] = {**predicted.get("text_config", {}), **_PREDICTED}
    _write(scratch, _with(config, predicted))
    drafter = builder.build_drafter(builder.configure(scratch), target.packed)
    if drafter is None:
        return None
    name, model, recorder = drafter
    reading, owners = read_modules(model, recorder)
    parts = {last(module): [last(part) for part in disk] for module, disk in target.modules_on_disk().items()}
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    most: dict[str, tuple[int, ...]] = {}
    for place in _PLACES:
        trial = replace(reading, loads={}, shards={})
        shapes = _likely_shapes(reading, {**parts, **reading.packed}, place.format(layers))
        trace(model, owners, shapes, trial)
        reached = {name: shape for name, shape in shapes.items() if trial.loads[pattern(name.removesuffix(".weight"))]}
        if len(reached) > len(most):
            most, reading.place = reached, place[: place.find("mtp") + 3] if "mtp" in place else "model"
    trace(model, owners, most, reading)
    choose_renames(model, recorder, reading, most)
    return name, reading


def _likely_shapes(reading: Reading, parts: Mapping[str, list[str]], layer: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors that the modules of a drafter may be loaded from, were their layer called ``layer``."""
    names: set[str] = set()
    above = layer.removesuffix(".0").removesuffix(".layers")
    for module in reading.quantized | reading.unquantized:
        tail = re.sub(r"^.*?layers\.\*\.(mtp_block\.)?", "", module) if ".layers.*." in module else last(module)
        ends = [f"{parent(tail)}.{part}".lstrip(".") for part in parts.get(last(tail), [last(tail)])]
        if module in reading.experts:
            ends = [f"{tail}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        for end in ends:
            names |= {f"{layer}.{end}.weight", f"{above}.{end}.weight"}
            if "mtp" in layer:
                names.add(f"{above}.{end}.0.weight")
    return dict.fromkeys(sorted(names), (8, 8))


# -------------------------------------------------------------------------------------------------------------- rows


def row(reading: Reading) -> dict[str, Any]:
    """Return the facts about a class as a row of the table."""
    experts: dict[str, list[str]] = {target: [] for target in sorted(reading.experts)}
    fused: dict[str, list[str]] = {}
    unlisted: set[str] = set()
    groups = reading.modules_on_disk()
    for target, modules in groups.items():
        single = sorted({last(module) for module in modules if is_expert(module, target)})
        parts = reading.packed.get(last(target), [])
        if target in reading.experts and single:
            experts[target] = single
        elif target in reading.experts:
            fused[target] = modules
        elif len(modules) > 1:
            modules.sort(key=lambda module: (_position(parts, last(module)), reading.shards[module], module))
            siblings = len({parent(module) for module in modules}) == 1
            fused[target] = [last(module) for module in modules] if siblings else modules
            if sorted(parts) != sorted(last(module) for module in modules):
                unlisted.add(target)
    for target in reading.quantized | reading.unquantized:  # that no tensor of this checkpoint reaches
        if target not in groups and len(reading.packed.get(last(target), ())) > 1:
            fused[target] = reading.packed[last(target)]
    facts = {
        "quantized": sorted(reading.quantized),
        "unquantized": sorted(reading.unquantized),
        "absorbed": sorted(reading.absorbed),
        "experts": experts,
        "fused": _by_last_name(fused),
        "unlisted": sorted(unlisted),
        "renames": reading.renames,
        "listed": reading.listed if reading.listed != reading.renames else None,
        "moves": _moves(reading, fused),
        "prefixes": _beginnings({name: reading.prefixes[name] for name in sorted(reading.quantized)}),
        "skipped": sorted(module for module, target in reading.loads.items() if not target),
        "drafter": reading.drafter,
        "place": reading.place,
        "generic": reading.generic,
    }
    return {key: value for key, value in facts.items() if value or (key == "listed" and value is not None)}


def is_expert(module: str, container: str) -> bool:
    """Whether a module on disk is one expert of the container, and not a stack of them."""
    return module.count("*") > container.count("*") and parent(module).endswith(".*")


def _position(items: list[str], item: str) -> int:
    return items.index(item) if item in items else len(items)


def _by_last_name(fused: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Call fused modules by their last name where all of that name have the same parts."""
    choices: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for target, parts in fused.items():
        choices[last(target)].add(tuple(parts))
    return {
        (last(target) if len(choices[last(target)]) == 1 else target): parts for target, parts in sorted(fused.items())
    }


def _moves(reading: Reading, fused: Mapping[str, list[str]]) -> dict[str, str]:
    """Return what is left to rename after the renames."""
    pairs: dict[str, str] = {}
    for module, target in sorted(reading.loads.items()):
        name = reading.new_names[module]
        if not target or name is None:
            continue
        if target in reading.experts and is_expert(name, target):
            pairs[parent(parent(name))] = target
        elif target in fused and all("." not in part for part in fused[target]):
            pairs[parent(name)] = parent(target)
        else:
            pairs[name] = target
    return _beginnings(pairs)


def _beginnings(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the shortest beginnings of names whose replacement, the longest first, turns each name into its pair."""
    beginnings: dict[str, str] = {}
    for source, target in pairs.items():
        if source == target:
            continue
        before, after = source.split("."), target.split(".")
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        if before and before.count("*") == after.count("*"):
            beginnings.setdefault(".".join(before), ".".join(after))
        else:
            beginnings[source] = target
    for source, target in pairs.items():
        if _replaced(source, beginnings) != target:
            beginnings[source] = target
    return dict(sorted(beginnings.items()))


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (beginning := ".".join(parts[:count])) in beginnings:
            return ".".join(filter(None, (beginnings[beginning], *parts[count:])))
    return name


def union(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for a class that several models of the zoo share."""
    result: dict[str, Any] = {}
    for facts in rows:
        for key, value in facts.items():
            if isinstance(value, dict):
                result[key] = {**result.get(key, {}), **value}
            elif isinstance(value, list):
                items = [*result.get(key, []), *(item for item in value if item not in result.get(key, []))]
                result[key] = items if key in ("renames", "listed") else sorted(items)
            else:
                result[key] = value
    if "unquantized" in result and "quantized" in result:
        result["quantized"] = [name for name in result["quantized"] if name not in result["unquantized"]]
    return result


# ------------------------------------------------------------------------------------------------------------- table


def read(builder: Builder, folder: Path) -> Iterator[tuple[str, Reading]]:
    """Build the class that a folder's config.json names, and its drafter; yield the name of each with its facts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = config["architectures"][0]
    shapes = stored_shapes(folder)
    with tempfile.TemporaryDirectory() as scratch:
        settings = _with(config, _fields(architecture))
        _write(Path(scratch), settings)
        try:
            model, recorder = builder.build(builder.configure(Path(scratch)))
        except (TypeError, ValueError):  # some want to know the class of the language model, as releases say
            if (named := _name_part(settings)) is None:
                raise
            _write(Path(scratch), named)
            model, recorder = builder.build(builder.configure(Path(scratch)))
        reading, owners = read_modules(model, recorder)
        trace(model, owners, shapes, reading)
        choose_renames(model, recorder, reading, shapes)
        as_quark, _ = read_modules(*builder.build(builder.configure(Path(scratch)), "quark"))
        reading.unquantized |= as_quark.unquantized
        reading.quantized -= as_quark.unquantized
        drafter = None
        try:
            drafter = read_drafter(builder, Path(scratch), config, reading)
        except Exception as error:
            sys.stderr.write(f"    the drafter of {architecture} cannot be built: {_reason(error)}\n")
    if drafter:
        reading.drafter = drafter[0]
        yield drafter
    yield architecture, reading


def _name_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    text = config.get("text_config")
    if not text or text.get("architectures") or text.get("model_type") not in NAMES:
        return None
    return {**config, "text_config": {**text, "architectures": [NAMES[text["model_type"]]]}}


def _with(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with more fields, also in its parts."""
    result = dict(config)
    for key, value in fields.items():
        result[key] = _with(result.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if fields.get(key, 0) is not None}


@cache
def _fields(architecture: str) -> Mapping[str, Any]:
    """Return the fields of a class's releases that the zoo's config.json lacks."""
    return yaml.safe_load(RELEASES.read_text(encoding="utf-8")).get(architecture, {})


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _reason(error: Exception) -> str:
    if VERBOSE:
        traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def write_table(output: Path, version: str, rows: Mapping[str, Any], failures: Mapping[str, str]) -> None:
    """Write the table as YAML, sorted by class."""
    table = {"vllm": version, "architectures": dict(sorted(rows.items())), "failures": dict(sorted(failures.items()))}
    body = yaml.safe_dump(table, default_flow_style=None, sort_keys=False, width=120)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(HEADER.format(version=version) + body, encoding="utf-8")


def generate(folders: Sequence[Path], output: Path | None, trace_file: Path | None, *, update: bool) -> None:
    """Read the class of each folder, and write the table."""
    from vllm_builder import Builder  # beside this script, which Python puts on its path

    builder = Builder()
    import vllm

    version = vllm.__version__.partition("+")[0]
    output = output or LOADERS / f"vllm-{'.'.join(version.split('.')[:2])}.yaml"
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    traces: dict[str, dict[str, str]] = defaultdict(dict)
    failures: dict[str, str] = {}
    for folder in folders:
        start = time.perf_counter()
        try:
            for architecture, reading in read(builder, folder):
                rows[architecture].append(row(reading))
                traces[architecture].update(reading.loads)
            sys.stderr.write(f"{folder.name}: {time.perf_counter() - start:.1f} s\n")
        except Exception as error:
            architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
            failures[architecture] = _reason(error)
            sys.stderr.write(f"{folder.name}: cannot be built: {failures[architecture]}\n")
    table = yaml.safe_load(output.read_text(encoding="utf-8")) if update and output.is_file() else {}
    architectures = {**table.get("architectures", {}), **{name: union(facts) for name, facts in rows.items()}}
    failures = {**table.get("failures", {}), **failures}
    failures = {name: reason for name, reason in failures.items() if name not in architectures}
    write_table(output, version, architectures, failures)
    if trace_file:
        trace_file.write_text(json.dumps(traces, indent=1, sort_keys=True), encoding="utf-8")
    sys.stderr.write(f"{output}: {len(architectures)} classes, {len(failures)} that cannot be built\n")


def build_zoo(names: Sequence[str], folder: Path) -> list[Path]:
    """Write models of the zoo below a folder; return the folder of each."""
    from tests.zoo import models

    folders: list[Path] = []
    for name in names or models.names():
        try:
            folders.append(models.build(name, folder / name))
        except Exception as error:
            sys.stderr.write(f"{name}: the zoo cannot build it: {_reason(error)}\n")
    return folders


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of tests/zoo whose rows are replaced (default: a new table)")
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="Python that has vLLM")
    parser.add_argument("--folders", nargs="+", type=Path, help="models to read; this Python has vLLM")
    parser.add_argument("--output", type=Path, help="file to write (default: the table of this version)")
    parser.add_argument("--trace", type=Path, help="also write the module that each module on disk reaches, as JSON")
    parser.add_argument("--update", action="store_true", help="keep the rows of other classes")
    arguments = parser.parse_args()
    if arguments.folders:
        generate(arguments.folders, arguments.output, arguments.trace, update=arguments.update)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [arguments.python, __file__, "--folders", *map(str, build_zoo(arguments.names, Path(folder)))]
        command += ["--output", str(arguments.output)] if arguments.output else []
        command += ["--trace", str(arguments.trace)] if arguments.trace else []
        command += ["--update"] if arguments.update or arguments.names else []
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # vLLM's Transformers backend renames by a set
        sys.exit(subprocess.run(command, check=False, env=environment).returncode)


if __name__ == "__main__":
    main()
