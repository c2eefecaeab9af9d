"""Classify every tensor of a model: quantizable weight, weight kept in 16 bit, or carried tensor.

The model is built on the meta device from its configuration, so that module types decide and not a pattern over
names. Names on disk are followed to the module's own by the renaming rules that transformers itself loads the
checkpoint with; a tensor that the rules lead nowhere keeps its name.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from quantmint.calibration.calls import replay_obstacle, skipped_layers
from quantmint.calibration.encodings import Encoded, plain_name
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import attention_modules, text_obstacle
from quantmint.calibration.replica import Renaming, is_interleaved, on_disk, sources
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.errors import StoreError, UserError
from quantmint.pipeline.base.machine import cache_folder, versions
from quantmint.pipeline.quantize.formats.checkpoint import SIXTEEN_BIT, Checkpoint, TensorInfo, read_config
from quantmint.pipeline.quantize.model.builder import decoder_prefix, meta_model, stored_tensors, towers
from quantmint.pipeline.quantize.model.completeness import missing_tensors, unexpected_tensors
from quantmint.pipeline.quantize.model.encodings import (
    LEFTOVERS,
    input_rounding,
    is_bias_of_gptq,
    quantized_by,
    source_encoding,
)
from quantmint.pipeline.quantize.model.experts import (
    UnknownLayoutError,
    WeightSource,
    biases_of,
    expert_shape,
    part_of,
    single_name,
    single_shape,
    split,
    stacked_names,
    stacks_experts,
)
from quantmint.pipeline.quantize.model.imagination import imagined_tensors
from quantmint.pipeline.quantize.model.kinds import LoaderKinds
from quantmint.pipeline.quantize.model.loader import load_view
from quantmint.pipeline.quantize.model.roles import Predictor, routers
from quantmint.pipeline.recipe.modules import declared_quantization, text_config
from quantmint.pipeline.store.disk import sha256_of, write_atomic

Tensors = Mapping[str, tuple[str, TensorInfo]]


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's parts under their names on disk; single experts under the names that they are written with.

    ``linear`` are the modules that schemes apply to, with [out_features, in_features]; ``kept`` the modules with a
    matrix that stay in 16 bit, with the reason (an output head is among them also where it shares the embedding's
    tensor); ``copied`` counts the other tensors, which are carried over as they are, by reason. ``unclaimed`` are
    tensors or modules inside the decoder that no rule knows, with the reason: a recipe must exclude them by name.
    ``attention`` are the attention modules in the order of their layers; ``parameters`` counts all elements of the
    model. ``predictor`` are the prefixes of the tensors of a multi-token predictor, and ``predictor_linear`` its linear
    modules that vLLM builds with a quantization, with [out_features, in_features]: they are among ``kept`` too, a stack
    of experts by the module that holds it, and stay in 16 bit unless the recipe's ``mtp`` says otherwise. ``head`` is
    the output head with [vocabulary, hidden], where it has a tensor of its own; it stays in 16 bit unless the recipe
    overrides it by its name.

    ``weights`` says for each linear module where its weight lies: the tensors that it names as stacks are not in the
    quantized checkpoint. ``biases`` are the biases of single experts that are stacked, by module. ``encoded`` maps each
    tensor of the source that is not in 16 bit to its encoding, and ``dropped`` are tensors of its quantization that no
    decoded weight needs. ``modules`` maps linear
    and attention modules to their names in transformers' model, with ``{experts}.{number}.{projection}`` for one of the
    experts that it stacks. ``aliases`` are the names by which vLLM asks for a module, where they are not its own; none
    where no name reaches it. ``joined`` are kinds of modules (names with * for numbers) behind whose rows vLLM puts
    those of other modules in one matrix, with the last names of all modules in it. ``walk_obstacle`` is why the layers
    cannot be run one at a time, ``text_obstacle`` why the model cannot be run on text alone, each as part of a
    sentence; ``unreached`` are the linear and attention modules that text alone does not run, so that nothing of them
    can be measured. ``latent`` is whether attention caches one latent for all heads; ``absorbed`` are linear modules
    that vLLM folds into their neighbours when it loads them; ``scales`` are tensors of the model itself that are called
    like those of a quantization; ``unquantizable`` counts the elements of the decoder's matrices that vLLM builds
    without a quantization. ``quantized_by`` is the quantization that the folder declares, but for FP8 in
    blocks; ``undecodable`` is why the folder is no source, as part of a sentence; ``rounds_inputs`` is whether the
    configuration rounds the inputs of linear layers.

    ``faults`` are contradictions between the configuration and the tensors on disk, each a rule, a tensor and words:
    what the configuration implies and nobody stored, what has another shape, and what is stored for no module.
    """

    linear: Mapping[str, tuple[int, int]]
    kept: Mapping[str, str]
    attention: tuple[str, ...]
    parameters: int
    weights: Mapping[str, WeightSource] = field(default_factory=dict, compare=False)
    encoded: Mapping[str, Encoded] = field(default_factory=dict, compare=False)
    dropped: tuple[str, ...] = field(default=(), compare=False)
    modules: Mapping[str, str] = field(default_factory=dict, compare=False)
    copied: Mapping[str, int] = field(default_factory=dict, compare=False)
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    predictor: tuple[str, ...] = ()
    predictor_linear: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    head: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    walk_obstacle: str | None = field(default=None, compare=False)
    text_obstacle: str | None = field(default=None, compare=False)
    unreached: tuple[str, ...] = field(default=(), compare=False)
    latent: bool = False
    absorbed: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    unquantizable: int = 0
    quantized_by: str | None = field(default=None, compare=False)
    undecodable: str | None = field(default=None, compare=False)
    faults: tuple[tuple[str, str, str], ...] = field(default=(), compare=False)
    biases: Mapping[str, WeightSource] = field(default_factory=dict, compare=False)
    rounds_inputs: bool = field(default=False, compare=False)

    @property
    def decoded_away(self) -> frozenset[str]:
        """Return the tensors of the source that decoding or quantizing drops: scales, and what belongs to them."""
        return frozenset(self.dropped).union(*(encoded.scales for encoded in self.encoded.values()))

    @property
    def quantizable(self) -> Mapping[str, tuple[int, int]]:
        """Return [out_features, in_features] of all modules that can have a scheme: predictor and head included."""
        return {**self.linear, **self.predictor_linear, **self.head}

    @property
    def predictor_stacks(self) -> frozenset[str]:
        """Return the modules of a predictor that hold a stack of experts, which are single modules once quantized."""
        stacks = (self.weights[module] for module in self.predictor_linear)
        return frozenset(source.tensor.rpartition(".")[0] for source in stacks if source.expert is not None)

    def require_whole(self, where: object) -> None:
        """Raise `UserError`, naming ``where``, if the tensors are not those that the configuration implies."""
        if self.faults:
            (_, name, message), more = self.faults[0], len(self.faults) - 1
            others = f"; {more} more tensor{'s contradict' if more > 1 else ' contradicts'} it" if more else ""
            raise UserError(f"{where}: found weights that are not those of config.json: {name}: {message}{others}.")


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
    structure = _Reading(meta_model(folder, trust_remote_code=trust_remote_code), config, tensors).structure()
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


def imagine(folder: Path, *, trust_remote_code: bool = False) -> tuple[Checkpoint, Structure]:
    """Return the checkpoint, in one file, that a model's ``config.json`` stands for, and its structure.

    It is for planning where the weights are not here: names, dtypes and sizes are those of the release.
    """
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    config = read_config(folder)
    plain = imagined_tensors(stored_tensors(model), model, config, ())
    structure = _Reading(model, {**config, "quantization_config": None}, plain).structure()
    tensors = imagined_tensors(stored_tensors(model), model, config, structure.linear)
    checkpoint = Checkpoint(folder, config, tuple(sorted({file for file, _ in tensors.values()})), tensors)
    encoding = source_encoding(config, tensors)
    stored_as = {plain_name(name): name for name in encoding.weights}
    weights = {
        module: replace(
            weight,
            tensor=stored_as[weight.tensor],
            encoded=encoding.weights[stored_as[weight.tensor]],
            transposed=False,  # only of stacks, whose encodings are not
        )
        if weight.tensor in stored_as
        else weight
        for module, weight in structure.weights.items()
    }
    scales = encoding.scales
    leftovers = [name for name in tensors if name.endswith(LEFTOVERS) and name not in scales]
    return checkpoint, replace(
        structure,
        encoded=encoding.weights,
        weights=weights,
        dropped=tuple(leftovers if encoding.weights else ()),
        quantized_by=quantized_by(config),
        undecodable=encoding.obstacle,
        rounds_inputs=input_rounding(config) is not None,
    )


OUTPUT_HEAD = "output head"
UNQUANTIZED = "vLLM builds it without a quantization"
"""Reasons why a module stays in 16 bit."""
_KNOWN = (None, "fp8", "compressed-tensors", "quark", "modelopt", "awq", "gptq", "mxfp4")
_EMBEDDING, _VECTOR, _TOWER = "embedding", "norm, bias or other vector", "outside the decoder"
_CONVOLUTION = "convolution"


@cache
def _carried_matrices() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return patterns of names of parameters that are matrices and stay as they are, each with the reason."""
    return tuple((re.compile(pattern), reason) for pattern, reason in load_table(__file__, "carried.yaml").items())


class _Reading:
    """One pass over the tensors on disk that sorts each by the model's parameter that it becomes (a part of)."""

    def __init__(self, model: Any, config: Mapping[str, Any], tensors: Tensors) -> None:
        self._model, self._config, self._tensors = model, config, tensors
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._state = model.state_dict().keys()
        self._owners = dict(model.named_modules())
        self._head = model.get_output_embeddings()
        self._rename = Renaming(model)
        prefix = decoder_prefix(model)
        self._decoder = f"{prefix}." if prefix else ""
        self._attention = attention_modules(model)
        self._towers = towers(model, prefix, self._attention)
        self._routers = routers(self._owners, self._decoder)
        self._predictor = Predictor(model)
        self._kinds = LoaderKinds(load_view(config))
        self._encoding = source_encoding(config, tensors)
        self._encoded = self._encoding.weights
        self._dropped: list[str] = []
        self._stored_as = {plain_name(name): name for name in self._encoded}
        self._linear: dict[str, tuple[int, int]] = {}
        self._weights: dict[str, WeightSource] = {}
        self._biases: dict[str, WeightSource] = {}
        self._modules: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._copied: Counter[str] = Counter()
        self._unclaimed: dict[str, str] = {}
        self._scales: list[str] = []
        self._unquantizable = 0
        self._roots: set[str] = set()
        self._predictor_linear: dict[str, tuple[int, int]] = {}
        self._head_shape: dict[str, tuple[int, int]] = {}
        self._stored: dict[str, list[str]] = defaultdict(list)  # by parameter: the tensors that become (a part of) it
        self._faults: list[tuple[str, str, str]] = []

    def structure(self) -> Structure:
        head = False
        scales = self._encoding.scales
        for name, (_, info) in self._tensors.items():
            if name in scales:
                continue
            parameter_name, operations = self._locate(name)
            owner, parameter = self._owners.get(parameter_name.rpartition(".")[0]), self._parameters.get(parameter_name)
            head |= owner is self._head
            self._stored[parameter_name].append(plain_name(name))
            if not operations and parameter is not None and info.dtype in (*SIXTEEN_BIT, "F32"):
                self._require_shape(name, info.shape, owner, tuple(parameter.shape))
            if name.endswith(LEFTOVERS) and self._is_model_scale(name, parameter_name):
                self._scales.append(name)
            elif self._encoded and (
                name.endswith(LEFTOVERS) or (parameter_name not in self._state and is_bias_of_gptq(name, self._encoded))
            ):
                self._dropped.append(name)
                continue
            self._classify(name, parameter_name, info, operations)
        if not head:
            # A head that is tied to the embedding has no tensor of its own, but servers look for its name.
            self._kept |= {name: OUTPUT_HEAD for name, module in self._owners.items() if module is self._head}
        owned = {name: parameter_name for parameter_name, names in self._stored.items() for name in names}
        attention = {name: parameter_name for parameter_name, name in on_disk(self._attention, owned).items()}
        walk_obstacle = replay_obstacle(self._model)
        skipped = skipped_layers(self._model) if walk_obstacle is not None else ()
        return Structure(
            linear=self._linear,
            kept=dict(sorted(self._kept.items())),
            attention=tuple(attention),
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            weights=self._weights,
            biases=self._biases,
            rounds_inputs=input_rounding(self._config) is not None,
            encoded=self._encoded,
            dropped=tuple(self._dropped),
            modules={**self._modules, **attention},
            copied=dict(sorted(self._copied.items())),
            unclaimed=self._unclaimed,
            predictor=tuple(sorted(self._roots)),
            predictor_linear=self._predictor_linear,
            head=self._head_shape,
            aliases=self._kinds.aliases((*self._linear, *self._kept)),
            joined=self._kinds.joined(self._linear),
            walk_obstacle=walk_obstacle,
            text_obstacle=text_obstacle(self._model),
            unreached=tuple(self._unreached(owned, attention, skipped)),
            latent=text_config(self._config).get("kv_lora_rank") is not None,
            scales=tuple(self._scales),
            unquantizable=self._unquantizable,
            absorbed=tuple(name for name in (*self._linear, *self._predictor_linear) if self._kinds.is_absorbed(name)),
            quantized_by=quantized_by(self._config),
            undecodable=self._encoding.obstacle,
            faults=tuple(self._contradictions()),
        )

    def _unreached(
        self, owned: Mapping[str, str], attention: Mapping[str, str], skipped: Sequence[str]
    ) -> Iterator[str]:
        """Yield the linear and attention modules of ``skipped`` layers, and linear ones whose input has no name.

        The latter are ERNIE's experts for images, which transformers stacks apart from those for text.
        """
        named = sources(self._model, owned)
        layers = tuple(f"{name}." for name in skipped)
        for module in self._linear:
            if module not in named or self._modules[module].startswith(layers):
                yield module
        yield from (module for module, parameter_name in attention.items() if parameter_name.startswith(layers))

    def _contradictions(self) -> Iterator[tuple[str, str, str]]:
        method = (declared_quantization(self._config) or {}).get("quant_method")
        if method in _KNOWN:  # others call their weights by names of their own
            yield from self._faults
            yield from missing_tensors(self._model, self._stored, self._owners, lambda name: self._locate(name)[0])
            yield from unexpected_tensors(self._model, self._stored, self._predictor, self._dropped)

    def _is_model_scale(self, name: str, parameter_name: str) -> bool:
        """Return whether a tensor called like a quantization's is a parameter of the model or of its predictor.

        A predictor has no modules here: its parameters are known by those of the same last name in the model.
        """
        if parameter_name in self._state:
            return True
        last = name.rpartition(".")[2]
        return self._predictor.root(name) is not None and last in self._scale_names

    @cached_property
    def _scale_names(self) -> frozenset[str]:
        """Return the last names of the model's parameters that are called like tensors of a quantization."""
        names = (name for name in self._tensors if name.endswith(LEFTOVERS) and self._predictor.root(name) is None)
        return frozenset(name.rpartition(".")[2] for name in names if self._locate(name)[0] in self._state)

    def _require_shape(self, name: str, shape: Sequence[int], owner: Any, expected: tuple[int, ...]) -> None:
        if tuple(shape) != expected and not stacks_experts(owner):
            message = f"it is {list(shape)}, config.json implies {list(expected)}"
            self._faults.append(("wrong shape", name, message))

    def _locate(self, name: str) -> tuple[str, tuple[Any, ...]]:
        """Return the parameter that a tensor belongs to, and the operations by which transformers rearranges it."""
        plain = plain_name(name)
        inner, operations = self._rename(plain)
        if inner not in self._state and plain in self._state:
            # The rules are for names of releases: DeepSeek V4's would lead the model's own name astray.
            return plain, ()
        module, _, last = plain.rpartition(".")
        if inner not in self._parameters and last in ("weight", "bias"):
            # One expert of a model whose release stacks them: quantized checkpoints hold them one by one.
            for stack in stacked_names(module):
                for spelled in (stack, f"{stack}.weight") if last == "weight" else (f"{stack}_bias",):
                    renamed, _ = self._rename(spelled)
                    if renamed in self._parameters:
                        return renamed, ()
        return inner, operations

    def _classify(self, name: str, parameter_name: str, info: TensorInfo, operations: tuple[Any, ...]) -> None:
        """Sort one tensor into what is quantized, kept, copied or unclaimed."""
        module = name.rpartition(".")[0]
        inside = parameter_name.rpartition(".")[0]
        owner, parameter = self._owners.get(inside), self._parameters.get(parameter_name)
        is_weight = plain_name(name).endswith(".weight")
        if parameter is None:
            self._carry(name, parameter_name, info)
        elif owner is self._head:
            if is_weight:
                self._kept[module] = OUTPUT_HEAD
                if owner.weight is not getattr(self._model.get_input_embeddings(), "weight", None):
                    self._head_shape[module] = tuple(owner.weight.shape)
                    self._weights[module], self._modules[module] = self._source(module), inside
        elif not parameter_name.startswith(self._decoder) or parameter_name.startswith(self._towers):
            self._keep(module, _TOWER, is_weight and parameter.ndim == 2 and not _embeds(owner))
        elif stacks_experts(owner):
            self._expert(name, parameter_name, info, operations)
        elif inside in self._routers:
            self._keep(module, "router", is_weight and parameter.ndim == 2)
        elif parameter.ndim < 2 or type(owner).__name__.endswith("Norm"):
            self._copied[_VECTOR] += 1
        elif _embeds(owner):
            self._copied[_EMBEDDING] += 1
        elif isinstance(owner, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
            self._copied[_CONVOLUTION] += 1
        elif max(parameter.shape) == parameter.numel():  # a vector in another shape
            self._copied[_VECTOR] += 1
        elif (reason := next((why for pattern, why in _carried_matrices() if pattern.search(name)), None)) is not None:
            self._copied[reason] += 1
        elif isinstance(owner, torch.nn.Linear) and is_weight and parameter.ndim == 2:
            # A tensor that becomes a part of the module's weight, or several of them, has rows of its own.
            rows = info.shape[0] if operations else owner.out_features
            self._matrix(module, inside, (rows, owner.in_features))
        elif self._kinds.is_quantizable(module) is False:
            self._keep(module, UNQUANTIZED, is_weight)
            self._unquantizable += parameter.numel()
        else:
            self._unclaimed[name] = f"{type(owner).__name__} multiplies with it, and no rule says how"

    def _keep(self, module: str, reason: str, is_matrix: bool) -> None:
        if is_matrix:
            self._kept[module] = reason
        else:
            self._copied[reason] += 1

    def _carry(self, name: str, parameter_name: str, info: TensorInfo) -> None:
        """Sort a tensor that is no parameter of the model: a buffer, or a part of a multi-token predictor."""
        if name.endswith(LEFTOVERS) and not self._is_model_scale(name, parameter_name):
            return
        module = name.rpartition(".")[0]
        root = self._predictor.root(name)
        if root is not None:
            self._roots.add(root)
        is_matrix = len(info.shape) >= 2 and "embed" not in module.rpartition(".")[2]
        is_weight = plain_name(name).endswith(".weight")
        if is_matrix and parameter_name not in self._state and (is_weight or len(info.shape) == 3):
            # A stack of experts has no module of its own: servers ask for the module that holds it.
            self._kept[module] = "predictor" if root is not None else "not built by transformers"
            if root is not None:
                self._predict(name, info)
        else:
            self._copied["predictor" if root is not None else "buffer"] += 1

    def _predict(self, name: str, info: TensorInfo) -> None:
        """Note a predictor's matrix, or each expert of its stack, if vLLM builds its module with a quantization."""
        if len(info.shape) == 2:
            source = WeightSource(name, encoded=self._encoded.get(name))
            elements = 1 if source.encoded is None else source.encoded.rule.elements
            parts = [(name.rpartition(".")[0], (info.shape[0], info.shape[1] * elements), source)]
        else:
            parts = self._predicted_experts(name, info)
        for module, shape, source in parts:
            if self._kinds.quantizes(module):
                self._predictor_linear[module], self._weights[module] = shape, source

    def _predicted_experts(self, name: str, info: TensorInfo) -> list[tuple[str, tuple[int, int], WeightSource]]:
        """Take a predictor's stack of experts apart as the model's own stacks are; empty where no rule says how."""
        last = name.removesuffix(".weight").rpartition(".")[2]
        owner_name = next((path for path, module in self._owners.items() if stacks_experts(module)), None)
        parameter = self._parameters.get(f"{owner_name}.{last}")
        if owner_name is None or parameter is None or name in self._encoded:
            return []
        stack, owner = f"{owner_name}.{last}", self._owners[owner_name]
        stacks = (
            tensor for tensor in self._tensors if tensor.endswith(f".{last}") and not self._predictor.root(tensor)
        )
        operations = next((self._locate(tensor)[1] for tensor in stacks), ())
        try:
            shape = expert_shape(owner, stack, parameter)
            experts = split(name, stack, owner, parameter, info.shape, operations)
            return [(module, shape, source) for module, _, source in experts]
        except UnknownLayoutError:
            return []

    def _expert(self, name: str, parameter_name: str, info: TensorInfo, operations: tuple[Any, ...]) -> None:
        owner, parameter = self._owners[parameter_name.rpartition(".")[0]], self._parameters[parameter_name]
        module = name.rpartition(".")[0]
        if parameter.ndim < 3:
            self._copied[_VECTOR] += 1
            if is_interleaved(owner) and len(info.shape) == 2 and name.endswith("_bias"):
                self._biases |= biases_of(name, info.shape[0])
            return
        try:
            shape = expert_shape(owner, parameter_name, parameter)
            if len(info.shape) > 2:
                encoded = self._encoded.get(name)
                for written, inside, source in split(
                    name, parameter_name, owner, parameter, info.shape, operations, encoded
                ):
                    self._add(written, inside, shape, source)
            elif plain_name(name).endswith(".weight") and (part := part_of(module)) is not None:
                inside = single_name(self._stacks_of(plain_name(name), parameter_name), *part)
                self._matrix(module, inside, single_shape(self._tensors, name, shape))
        except UnknownLayoutError as error:
            self._unclaimed[name] = f"this stack of experts cannot be taken apart: {error}"

    def _stacks_of(self, name: str, first: str) -> Iterator[tuple[str, Any]]:
        """Yield the stacks that may hold a single expert, and their parameters: ``first``, and those that follow."""
        yield first, self._parameters.get(first)
        yield from ((stack, self._parameters.get(stack)) for stack in self._rename.targets(name)[1:])

    def _matrix(self, module: str, inside: str, shape: tuple[int, int]) -> None:
        if self._kinds.is_quantizable(module) is False:
            self._kept[module] = UNQUANTIZED
            self._unquantizable += prod(shape)
        else:
            self._add(module, inside, shape, self._source(module))

    def _add(self, module: str, inside: str, shape: tuple[int, int], source: WeightSource) -> None:
        self._linear[module], self._weights[module], self._modules[module] = shape, source, inside

    def _source(self, module: str) -> WeightSource:
        name = self._stored_as.get(f"{module}.weight", f"{module}.weight")
        return WeightSource(name, encoded=self._encoded.get(name))


def _embeds(owner: Any) -> bool:
    return isinstance(owner, torch.nn.Embedding)
