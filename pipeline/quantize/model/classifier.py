"""Classify every tensor of a model: quantizable weight, weight kept in 16 bit, or carried tensor.

The model is built on the meta device from its configuration, so that module types decide and not a pattern over
names. Names on disk are followed to the module's own by the renaming rules that transformers itself loads the
checkpoint with; a tensor that the rules lead nowhere keeps its name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from math import prod
from typing import Any

from quantmint.calibration.calls import replay_obstacle, skipped_layers
from quantmint.calibration.encodings import plain_name
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import attention_modules, text_obstacle
from quantmint.calibration.replica import Renaming, is_interleaved, on_disk, sources
from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.quantize.formats.checkpoint import SIXTEEN_BIT, TensorInfo
from quantmint.pipeline.quantize.model.builder import decoder_prefix, towers
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
    stack_names,
    stacked_names,
    stacks_experts,
)
from quantmint.pipeline.quantize.model.kinds import LoaderKinds
from quantmint.pipeline.quantize.model.loader import load_view
from quantmint.pipeline.quantize.model.roles import Predictor, routers
from quantmint.pipeline.quantize.model.structure import OUTPUT_HEAD, UNQUANTIZED, Structure
from quantmint.pipeline.recipe.modules import declared_quantization, text_config

Tensors = Mapping[str, tuple[str, TensorInfo]]
_KNOWN = (None, "fp8", "compressed-tensors", "quark", "modelopt", "awq", "gptq", "mxfp4")
_EMBEDDING, _VECTOR, _TOWER = "embedding", "norm, bias or other vector", "outside the decoder"
_CONVOLUTION = "convolution"


@cache
def _carried_matrices() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return patterns of names of parameters that are matrices and stay as they are, each with the reason."""
    return tuple((re.compile(pattern), reason) for pattern, reason in load_table(__file__, "carried.yaml").items())


class TensorClassifier:
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
        """Classify all tensors, and return the model's structure. Call it once."""
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
            stacks=stack_names(self._owners),
            copied=dict(sorted(self._copied.items())),
            unclaimed=self._unclaimed,
            predictor=self._predictor.prefixes(self._roots, as_layers=self._kinds.predicts_in_layers),
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
