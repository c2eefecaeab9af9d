"""Which tensors of a checkpoint are weights of linear modules, which modules are attention, and who gets which scheme.

The model is built on the meta device from its configuration, so that module types decide and not a pattern over
names. Names on disk are followed to the module's own by the renaming rules that transformers itself loads the
checkpoint with; what the rules lead nowhere, the layers of a multi-token predictor say, stays as it is.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from calibration.lazy import torch
from calibration.replica import Renaming, attention_by_layer
from pipeline.base.canonical import fingerprint
from pipeline.base.errors import StoreError, UserError, did_you_mean, first_line
from pipeline.base.machine import cache_folder, versions
from pipeline.quantize.formats.checkpoint import (
    SINGLE_NAME,
    SIXTEEN_BIT,
    Checkpoint,
    TensorInfo,
    read_json,
    tensor_bytes,
)
from pipeline.quantize.formats.layout import Choice
from pipeline.quantize.model.weights import (
    Structure as Structure,
)
from pipeline.quantize.model.weights import (
    WeightSource,
    encoded_weights,
    expert_shape,
    other_experts,
    part_of,
    quantized_by,
    split,
    stacked_name,
    stacks_experts,
)
from pipeline.recipe.modules import assigned, declared_quantization, matches
from pipeline.recipe.schema import Quantization
from pipeline.store.disk import sha256_of, write_atomic


def meta_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the language model of a folder on the meta device: no weights, no memory.

    A checkpoint that was saved with more than the language model, a vision tower say, is built as the class that it
    names, so that every tensor has its module. Raises `UserError` where transformers does not know the architecture.
    """
    with light_imports():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  # what is built with below

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        # A quantized checkpoint is inspected as the model it was made from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a configuration makes transformers stumble over, it is the configuration's
        raise UserError(
            f"{folder}: transformers cannot build this model from its config.json: {first_line(error)}"
        ) from None


# Packages that transformers and what it imports take along wherever they are installed, for what nobody does here:
# assisted generation, an event loop, Amazon's API. They would be a third of the start of a process.
_HEAVY = ("sklearn", "trio", "boto3")


@contextmanager
def light_imports() -> Iterator[None]:
    """Import without `_HEAVY`, and without collecting garbage: imports make none, and looking for it is a sixth."""
    absent = [name for name in _HEAVY if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # Python's own sign for "cannot be imported"
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name)
        if collecting:
            gc.freeze()  # modules stay: nobody need look through them again
            gc.enable()


def _auto_class(config: Any) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    named = getattr(config, "architectures", None) or ()
    return AutoModelForImageTextToText if getattr(wrapper, "__name__", None) in named else AutoModelForCausalLM


def stored_tensors(model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name on disk, dtype and shape of each tensor that transformers would save in bfloat16, tied ones once.

    What a model insists on having in float32, DeepSeek's correction of its router, is that.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wide = frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {
        name: ("BF16" if wide.isdisjoint(name.split(".")) else "F32", tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, state).items()
    }


Tensors = Mapping[str, tuple[str, TensorInfo]]
_PACKED = "weight_packed"
_KNOWN = (None, "fp8", "compressed-tensors", "quark")
_QUANTIZED = ("_scale", "_scale_inv", "_zero_point", "_shape", "_g_idx")  # what layouts put beside weights
_CARRIED = (r"rotary_emb\.inv_freq$", r"(^|\.)mtp\.")  # of no use to those who load them, whatever the family


def read_structure(folder: Path, tensors: Tensors, *, trust_remote_code: bool = False) -> Structure:
    """Read a model's structure from its ``config.json``, for the ``tensors`` that are on disk.

    Raises `UserError` where transformers does not know the architecture, and for tensors that nobody could decode or
    take apart.
    """
    config = read_json(folder / "config.json")
    place = None if trust_remote_code else _answer(config, tensors)
    if place is not None:
        with suppress(OSError, ValueError):  # it was never asked, or by another version
            return TypeAdapter(Structure).validate_json(place.read_bytes())
    structure = _Reading(meta_model(folder, trust_remote_code=trust_remote_code), config, tensors).structure()
    if place is not None:
        with suppress(OSError, StoreError):  # a cache that cannot be written is none
            place.parent.mkdir(parents=True, exist_ok=True)
            data = json.dumps(asdict(structure)).encode()
            write_atomic(place, data, temporary=place.with_name(f"{place.name}.{os.getpid()}.partial"))
    return structure


def _answer(config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Where the answer about a model is kept, in the user's cache: asking takes the import of transformers, seconds.

    It is found by everything that it follows from: the configuration, the tensors on disk, the versions of the
    libraries that are asked, and the code here that asks them. A model's own Python code could answer otherwise
    tomorrow, so its answers are never kept.
    """
    code = [sha256_of(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    stored = [[info.name, info.dtype, list(info.shape)] for _, info in tensors.values()]
    key = fingerprint([json.dumps(config, sort_keys=True), stored, versions("torch", "transformers"), code])
    return cache_folder() / "structures" / f"{key}.json"


def imagine(folder: Path, *, trust_remote_code: bool = False) -> tuple[Checkpoint, Structure]:
    """The bfloat16 checkpoint that a model's ``config.json`` stands for, in one file, and its structure.

    For planning where the weights are not here: names and sizes are those that transformers would save.
    """
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    position = 0
    for name, (dtype, shape) in stored_tensors(model).items():
        end = position + tensor_bytes(dtype, shape)
        tensors[name] = (SINGLE_NAME, TensorInfo(name, dtype, shape, position, end))
        position = end
    config = read_json(folder / "config.json")
    return Checkpoint(folder, config, (SINGLE_NAME,), tensors), _Reading(model, config, tensors).structure()


class _Reading:
    """One pass over the tensors on disk, sorting each by the parameter of the model that it becomes (a part of)."""

    def __init__(self, model: Any, config: Mapping[str, Any], tensors: Tensors) -> None:
        self._model, self._config, self._tensors = model, config, tensors
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._owners = dict(model.named_modules())
        self._head, self._embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        self._rename = Renaming(model)
        decoder = model.get_decoder()
        self._decoder = next(name for name, module in self._owners.items() if module is decoder)
        self._routers = frozenset(_routers(self._owners))
        self._encoded = encoded_weights(config, tensors)
        self._linear: dict[str, tuple[int, int]] = {}
        self._weights: dict[str, WeightSource] = {}
        self._modules: dict[str, str] = {}
        self._kept: set[str] = set()
        self._prefixes: dict[str, str] = {}  # of the model's modules, to what they are called on disk
        self._stored: dict[str, list[str]] = defaultdict(list)  # by parameter: the tensors that become (a part of) it
        self._faults: list[tuple[str, str, str]] = []

    def structure(self) -> Structure:
        head = False
        for name, (_, info) in self._tensors.items():
            own, operations = self._locate(name)
            owner, parameter = self._owners.get(own.rpartition(".")[0]), self._parameters.get(own)
            head |= owner is self._head
            self._remember(name, own)
            self._stored[own].append(_plain(name))
            if not operations and parameter is not None and info.dtype in (*SIXTEEN_BIT, "F32"):
                self._hold(name, info.shape, owner, tuple(parameter.shape))
            if parameter is None:
                self._unknown(name, info)
            elif stacks_experts(owner):
                self._expert(name, own, info, operations)
            elif name.rpartition(".")[2] in ("weight", _PACKED):
                self._weight(name, own, owner, parameter)
        if not head:
            # A head that is tied to the embedding has no tensor of its own, but servers look for its name.
            self._kept |= {name for name, module in self._owners.items() if module is self._head}
        attention = [(self._prefixes.get(name, name), name) for name in attention_by_layer(self._model).values()]
        return Structure(
            linear=self._linear,
            kept=tuple(sorted(self._kept)),
            attention=tuple(stored for stored, _ in attention),
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            weights=self._weights,
            encoded=self._encoded,
            modules={**self._modules, **dict(attention)},
            quantized_by=quantized_by(self._config),
            faults=tuple(self._contradictions()),
        )

    def _contradictions(self) -> Iterator[tuple[str, str, str]]:
        method = (declared_quantization(self._config) or {}).get("quant_method")
        if method in _KNOWN:  # others call their weights by names of their own
            yield from (*self._faults, *self._missing(), *self._nobodys())

    def _hold(self, name: str, shape: Sequence[int], owner: Any, expected: tuple[int, ...]) -> None:
        if tuple(shape) != expected and not stacks_experts(owner):
            message = f"it is {list(shape)}, config.json implies {list(expected)}"
            self._faults.append(("wrong shape", name, message))

    def _missing(self) -> Iterator[tuple[str, str, str]]:
        """What transformers would save and nobody stored, by whatever name and in whatever pieces."""
        implied = stored_tensors(self._model)
        seen = {name for names in self._stored.values() for name in names}
        stacks: set[str] = set()
        for name in (name for name in implied if name not in seen):
            own, _ = self._locate(name)
            stored = self._stored.get(own, [])
            if implied.keys().isdisjoint(stored) and stored:  # the same weights by other names
                owner = self._owners.get(own.rpartition(".")[0])
                if own not in stacks and owner is not None and stacks_experts(owner):
                    stacks.add(own)
                    lacking = other_experts(stored, own, self._parameters[own].shape[0])
                    yield from (("missing", one, "config.json implies it, it is not stored") for one in lacking)
            else:
                yield "missing", name, f"config.json implies it, {list(implied[name][1])}; it is not stored"

    def _nobodys(self) -> Iterator[tuple[str, str, str]]:
        """Tensors of no module, but what this family is known to carry along."""
        text, known = self._model.config.get_text_config(), self._model.state_dict().keys()
        layers, more = getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", None) or 0
        carried = [*(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_CARRIED]
        carried += [rf"\.layers\.{layers + one}\." for one in range(more)]
        for own, names in self._stored.items():
            for name in names if own not in known else ():
                if not name.endswith(_QUANTIZED) and not any(re.search(pattern, name) for pattern in carried):
                    yield "undeclared", name, "it is stored, and no module of config.json has it"

    def _locate(self, name: str) -> tuple[str, tuple[Any, ...]]:
        """The parameter that a tensor belongs to, and how transformers rearranges it."""
        plain = _plain(name)
        own, operations = self._rename(plain)
        if own not in self._parameters and plain.endswith(".weight"):
            # One expert of a model whose release stacks them: quantized checkpoints hold them one by one.
            for stack in stacked_name(plain.removesuffix(".weight")):
                found, _ = self._rename(stack)
                if found in self._parameters:
                    return found, ()
        return own, operations

    def _remember(self, name: str, own: str) -> None:
        if name.rsplit(".", 2)[1:] == own.rsplit(".", 2)[1:]:
            self._prefixes.setdefault(own.rsplit(".", 2)[0], name.rsplit(".", 2)[0])

    def _unknown(self, name: str, info: TensorInfo) -> None:
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(info.shape) == 2 and "embed" not in module.rpartition(".")[2]:
            self._kept.add(module)

    def _expert(self, name: str, own: str, info: TensorInfo, operations: tuple[Any, ...]) -> None:
        owner, parameter = self._owners[own.rpartition(".")[0]], self._parameters[own]
        module, _, suffix = name.rpartition(".")
        shape = expert_shape(owner, own, parameter)
        if len(info.shape) == 3:
            if name in self._encoded:
                raise UserError(f"{name}: it is a stack of experts in {info.dtype}, which is not decoded.")
            for written, inside, source in split(name, own, owner, parameter, info.shape, operations):
                self._add(written, inside, shape, source)
        elif suffix in ("weight", _PACKED) and (part := part_of(module)) is not None:
            self._add(module, f"{own.rpartition('.')[0]}.{part[0]}.{part[1]}", shape, self._plain(module))

    def _weight(self, name: str, own: str, owner: Any, parameter: Any) -> None:
        module, inside = name.rpartition(".")[0], own.rpartition(".")[0]
        if owner is self._head:
            self._kept.add(module)
        elif parameter.ndim != 2 or isinstance(owner, torch.nn.Embedding):
            return
        elif isinstance(owner, torch.nn.Linear) and inside not in self._routers and self._is_text(inside):
            self._add(module, inside, (owner.out_features, owner.in_features), self._plain(module))
        else:
            self._kept.add(module)

    def _add(self, module: str, inside: str, shape: tuple[int, int], source: WeightSource) -> None:
        self._linear[module], self._weights[module], self._modules[module] = shape, source, inside

    def _plain(self, module: str) -> WeightSource:
        return WeightSource(f"{module}.weight", scale=self._encoded.get(f"{module}.weight"))

    def _is_text(self, inside: str) -> bool:
        return not self._decoder or inside.startswith(f"{self._decoder}.")


def _plain(name: str) -> str:
    """The rules know 16-bit names: a packed weight goes by its weight's."""
    return f"{name.removesuffix(_PACKED)}weight" if name.endswith(_PACKED) else name


def _routers(owners: Mapping[str, Any]) -> Iterable[str]:
    """Linear modules that choose or weigh experts: beside the experts, or inside a module that is called a router."""
    blocks = {name.rpartition(".")[0] for name, module in owners.items() if stacks_experts(module)}
    for name, module in owners.items():
        if isinstance(module, torch.nn.Linear):
            parent = name.rpartition(".")[0]
            kinds = (type(module).__name__, type(owners[parent]).__name__)
            if parent in blocks or any(kind.endswith(("Router", "Gate")) for kind in kinds):
                yield name


def select(structure: Structure, quantization: Quantization) -> Choice:
    """Assign a scheme, or 16 bit, to every linear module.

    Raises `UserError` for a name that matches nothing, because a typo would otherwise quantize what was meant to stay,
    where nothing is left to quantize, and for a source that is quantized already or not what its configuration says.
    """
    if structure.quantized_by is not None:
        raise UserError(
            f"source: found a model that is quantized already (quant_method {structure.quantized_by}), expected 16-bit "
            "weights, or FP8 in blocks of 128x128.",
            hint="Start from the 16-bit release of the model.",
        )
    structure.require_whole("source")
    everything = (*structure.linear, *structure.kept)
    for pattern in quantization.exclude:
        _require_match(pattern, everything, "exclude")
    for override in quantization.overrides:
        for pattern in override.modules:
            _refuse_kept(pattern, structure)
            _require_match(pattern, tuple(structure.linear), "overrides")
    wanted = {module: assigned(quantization, module) for module in structure.linear}
    schemes = {module: scheme for module, scheme in wanted.items() if scheme is not None}
    if not schemes:
        raise UserError(
            f"quantization.exclude: found every one of the model's {len(wanted)} linear modules excluded, "
            "expected at least one to quantize."
        )
    kept = (*structure.kept, *(module for module in structure.linear if module not in schemes))
    return Choice(
        schemes=schemes,
        kept=tuple(sorted(kept)),
        kv_cache=quantization.kv_cache == "fp8",
        kv_per_head=quantization.kv_cache_granularity == "head",
    )


def _refuse_kept(pattern: str, structure: Structure) -> None:
    # A pattern may sweep over what is kept; a name, or a pattern that means nothing else, is a wish that fails.
    kept = [module for module in structure.kept if matches(pattern, module)]
    if kept and not any(matches(pattern, module) for module in structure.linear):
        raise UserError(
            f"quantization.overrides: found {pattern!r}, which means {kept[0]} and nothing that is quantized; the "
            "output head, routers, vision towers and the layers of a multi-token predictor stay in 16 bit.",
            hint="Take it out of `overrides`.",
        )


def _require_match(pattern: str, modules: Sequence[str], field: str) -> None:
    if not any(matches(pattern, module) for module in modules):
        raise UserError(
            f"quantization.{field}: found {pattern!r}, which matches none of the model's {len(modules)} modules"
            f"{did_you_mean(pattern, modules)}."
        )
