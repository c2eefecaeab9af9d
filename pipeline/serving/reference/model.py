"""A checkpoint as a model of transformers that computes what the stored bytes stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.hooks import taking_inputs
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Renaming, owners
from quantmint.calibration.weights import Shards, Weights, held, settle_buffers
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.schemes import ActivationFormat
from quantmint.pipeline.base.schemes import scheme as row_of
from quantmint.pipeline.quantize.engines.stream.kernels import MX_GROUP
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, Reader, open_checkpoint
from quantmint.pipeline.quantize.formats.layout import Claims, layout_of
from quantmint.pipeline.quantize.inspection.findings import check_structure, expected_tensors
from quantmint.pipeline.quantize.inspection.numbers import dequantize
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.experts import ExpertSlice, expert_slice
from quantmint.pipeline.quantize.model.structure import Structure, read_structure
from quantmint.pipeline.quantize.rounding import Scales, round_activations
from quantmint.pipeline.recipe.modules import text_config

_NAMES = {"e4m3": "FP8", "int8": "INT8", "e2m1": "FP4", "e2m3": "FP6", "e3m2": "FP6"}
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to answer; ``kv_scales`` may be empty, ``runtime`` are words for what computes."""

    model: Any
    device: str
    kv_scales: Scales
    runtime: str

    @property
    def kv_cache_dtype(self) -> str:
        """Of the cache that answers are computed with, as vLLM names it: "fp8" or "auto"."""
        return "fp8" if self.kv_scales else "auto"


def load(folder: Path, device: str, *, trust_remote_code: bool = False) -> Loaded:
    """A model or checkpoint on a device, in float32; `UserError` for one that is unsound, or cannot be represented."""
    checkpoint = open_checkpoint(folder)
    structure = read_structure(folder, checkpoint.tensors, trust_remote_code=trust_remote_code)
    structure.require_whole(folder)
    claims = _claims(checkpoint, structure)
    model = meta_model(folder, trust_remote_code=trust_remote_code).float().eval()
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    state = next((kind for kind in kinds if any(word in kind for word in _RECURRENT)), None)
    if state is not None or getattr(model, "_is_stateful", False):
        raise _unknown(folder, f"its layers keep a state ({state or 'stateful'}), which padding would change")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # products of single experts, which can be seen
    placing = Placing(checkpoint, structure, claims, model, device)
    placing.weights()
    placing.activations()
    used = sorted({scheme for scheme in claims.schemes.values() if scheme is not None})
    return Loaded(model, device, placing.kv_scales(), runtime_words(used, fp8_cache=claims.kv_cache))


def _claims(checkpoint: Checkpoint, structure: Structure) -> Claims:
    if structure.quantized_by is None:
        return Claims({}, {}, kv_cache=False)
    form = layout_of(checkpoint.config)
    declared: Mapping[str, Any] = checkpoint.config["quantization_config"]
    if (declared.get("transform_config") or {}).get("config_groups"):
        raise _unknown(checkpoint.folder, "its transform_config rotates activations when the model runs")
    claims = form.claims(declared, [*structure.linear, *structure.kept])
    if claims.unknown:
        module, what = next(iter(claims.unknown.items()))
        raise _unknown(checkpoint.folder, f"the configuration of {module} ({what}) is no scheme that quantmint knows")
    rank = text_config(checkpoint.config).get("kv_lora_rank")
    if claims.kv_cache and rank is not None:
        raise _unknown(checkpoint.folder, f"it has an FP8 cache for latent attention (kv_lora_rank {rank})")
    finding = next(check_structure(checkpoint, structure, claims), None)
    if finding is not None:
        raise UserError(
            f"{checkpoint.folder}: it is not what its configuration promises: {finding.where}: {finding.message}",
            hint="`quantmint inspect` lists every such finding.",
        )
    return claims


def _unknown(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder}: the reference runtime cannot represent this checkpoint: {why}.",
        hint="Take evaluation.runtime: vllm.",
    )


def reference_version() -> str:
    """The library that computes, with its version: "transformers 5.17.0"."""
    return f"transformers {versions('transformers')['transformers']}"


def runtime_words(schemes: Iterable[str], *, fp8_cache: bool) -> str:
    """What is computed with, of a checkpoint with these schemes; without one it is in 16 bit."""
    rows = [row_of(scheme) for scheme in schemes]
    rounded = [row.activations for row in rows if row.activations.kind != "none"]
    kinds = list(dict.fromkeys(("MX" if a.group == MX_GROUP else "") + _NAMES[a.dtype or ""] for a in rounded))
    words = [f"{reference_version()} in float32", "dequantized weights" if rows else "16-bit weights"]
    if kinds:
        words.append(f"simulated {' and '.join(kinds)} activations")
    if fp8_cache:
        words.append("FP8 KV cache")
    return ", ".join(words)


Round = Callable[["torch.Tensor"], "torch.Tensor"]


class Placing:
    """Fills a model that was built on the meta device, in its own dtype, from a checkpoint whose structure is sound."""

    def __init__(self, checkpoint: Checkpoint, structure: Structure, claims: Claims, model: Any, device: str) -> None:
        self._checkpoint, self._inside, self._model, self._device = checkpoint, structure.modules, model, device
        self._read, self._kv_names = Reader(checkpoint), {}
        self._schemes = {module: scheme for module, scheme in claims.schemes.items() if scheme is not None}
        self._stored = expected_tensors(checkpoint, structure, claims) if self._schemes else {}
        if claims.kv_cache:
            form = layout_of(checkpoint.config)
            self._kv_names = {attention: form.kv_scale_names(attention) for attention in structure.attention}

    def weights(self) -> None:
        """Put every weight onto the device; raises `UserError` where one is missing."""
        settle_buffers(self._model, self._device)
        try:
            shards = _Dequantized(self._checkpoint.folder, self._carried(), list(self._stored), self._weight)
            owned = owners(self._model, shards.names)
            # transformers has no rule for single experts where releases stack them on disk.
            loose = {name.removesuffix(".weight") for name in shards.names if name not in owned}
            placed = {self._fill(module) for module in self._inside if module in loose}
            weights = Weights(self._model, shards, owned, self._device)
            weights.load([name for name in held(self._model) if name not in placed])
        except CalibrationError as error:
            raise UserError(str(error)) from None

    def activations(self) -> None:
        """Round what enters each quantized layer as its scheme says."""
        stacks: dict[str, dict[tuple[str, int], Round]] = {}
        layers: dict[str, tuple[ActivationFormat, torch.Tensor | None]] = {}
        rename = Renaming(self._model)
        for module, tensors in self._stored.items():
            row = row_of(self._schemes[module]).activations
            if row.kind == "none":
                continue
            named = next((stored.name for stored in tensors if stored.role == "input_scale"), None)
            scale = None if named is None else self._tensor(named).float().reshape(())
            if (stack := self._stack(module)) is not None:
                place = self._place(module)
                stacks.setdefault(stack, {})[place.parameter, place.expert] = _rounding(row, scale)
                continue
            # One module on disk may be several of the model, and several one: then vLLM takes the largest scale.
            for target in rename.targets(f"{module}.weight"):
                layer = target.removesuffix(".weight")
                before = layers[layer][1] if layer in layers else None
                layers[layer] = row, scale if scale is None or before is None else torch.maximum(scale, before)
        for layer, (row, scale) in layers.items():
            self._model.get_submodule(layer).register_forward_pre_hook(_entering(_rounding(row, scale)))
        for stack, rounds in stacks.items():
            round_inputs(self._model.get_submodule(stack), rounds)

    def kv_scales(self) -> Scales:
        """K's and V's scales by layer: [1], or [heads, 1, 1]; empty where the cache is not quantized."""
        return {
            self._model.get_submodule(self._inside[attention]).layer_idx: (self._kv_scale(key), self._kv_scale(value))
            for attention, (key, value) in self._kv_names.items()
        }

    def _kv_scale(self, name: str) -> torch.Tensor:
        scale = self._tensor(name).float()
        return scale.reshape(1) if scale.numel() == 1 else scale.reshape(-1, 1, 1)

    def _carried(self) -> list[str] | None:
        """Tensors that are loaded as they are stored; None for all of a model that is not quantized."""
        if not self._stored:
            return None
        taken = {stored.name for tensors in self._stored.values() for stored in tensors}
        taken |= {name for names in self._kv_names.values() for name in names}
        return [name for name in self._checkpoint.tensors if name not in taken]

    def _fill(self, module: str) -> str:
        """Put a single expert's weight into its stack; return the name of that parameter."""
        name, place = self._inside[module].rsplit(".", 2)[0], self._place(module)
        experts = self._model.get_submodule(name)
        if getattr(experts, place.parameter).is_meta:
            empty = torch.empty_like(getattr(experts, place.parameter), device=self._device)
            setattr(experts, place.parameter, torch.nn.Parameter(empty, requires_grad=False))
        place.of(getattr(experts, place.parameter)).copy_(self._weight(module))
        return f"{name}.{place.parameter}"

    def _weight(self, module: str) -> torch.Tensor:
        if module not in self._stored:
            return self._tensor(f"{module}.weight").float()
        parts = {stored.role: self._tensor(stored.name) for stored in self._stored[module]}
        return dequantize(self._schemes[module], parts)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._read(name).to(self._device)

    def _stack(self, module: str) -> str | None:
        """The module that stacks experts of which this is one; None for a module of its own."""
        prefix, _, number = self._inside[module].rpartition(".")[0].rpartition(".")
        if not number.isdigit():
            return None
        experts = self._model.get_submodule(prefix)
        return prefix if any(p.ndim == 3 for p in experts.parameters(recurse=False)) else None

    def _place(self, module: str) -> ExpertSlice:
        name, number, projection = self._inside[module].rsplit(".", 2)
        return expert_slice(self._model.get_submodule(name), name, int(number), projection)


class _Dequantized(Shards):
    """The tensors of a quantized checkpoint as transformers' rules know them: each weight under its 16-bit name.

    ``carried`` are the tensors that stay as they are stored, ``modules`` those whose weights are ``dequantized``.
    """

    def __init__(
        self,
        folder: Path,
        carried: Collection[str] | None,
        modules: Iterable[str],
        dequantized: Callable[[str], torch.Tensor],
    ) -> None:
        super().__init__(folder, only=carried)
        self._modules, self._dequantized = {f"{module}.weight": module for module in modules}, dequantized

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, *self._modules)

    def read(self, name: str, device: str) -> torch.Tensor:
        return self._dequantized(self._modules[name]) if name in self._modules else super().read(name, device)


def _rounding(activations: ActivationFormat, input_scale: torch.Tensor | None) -> Round:
    return partial(round_activations, activations=activations, input_scale=input_scale)


def _entering(rounded: Round) -> Any:
    def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounded(inputs[0]).to(inputs[0].dtype), *inputs[1:])

    return hook


def round_inputs(module: Any, rounds: Mapping[tuple[str, int], Round]) -> tuple[Any, Any]:
    """Round what enters a module that stacks experts; ``rounds`` are by parameter and number of the expert.

    Returns the handles of its hooks.
    """
    return taking_inputs(module, lambda key, one, rows: rounds[key, one](rows) if (key, one) in rounds else rows)
