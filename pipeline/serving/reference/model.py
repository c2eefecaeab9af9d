"""A checkpoint as a model of transformers that computes what the stored bytes stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from calibration.errors import CalibrationError
from calibration.hooks import taking_inputs
from calibration.lazy import torch
from calibration.replica import owners
from calibration.weights import Shards, Weights, held, settle_buffers
from pipeline.base.errors import UserError
from pipeline.base.machine import versions
from pipeline.base.schemes import scheme as row_of
from pipeline.quantize.engines.stream.kernels import MX_GROUP
from pipeline.quantize.formats.checkpoint import Checkpoint, Reader, open_checkpoint
from pipeline.quantize.formats.layout import Claims, layout_of
from pipeline.quantize.inspection.findings import check_structure, expected_tensors
from pipeline.quantize.inspection.numbers import dequantize
from pipeline.quantize.model.builder import meta_model
from pipeline.quantize.model.experts import ExpertSlice, expert_slice
from pipeline.quantize.model.structure import Structure, read_structure
from pipeline.quantize.rounding import Scales, round_activations
from pipeline.recipe.modules import text_config

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
        # A stack with one quantized expert is put together here as a whole.
        stacks = {self._stack(module) for module in self._stored} - {None}
        self._ours = [module for module in structure.linear if module in self._stored or self._stack(module) in stacks]

    def weights(self) -> None:
        """Put every weight onto the device; raises `UserError` where one is missing."""
        settle_buffers(self._model, self._device)
        placed = {self._fill(module) for module in self._ours}
        try:
            shards = Shards(self._checkpoint.folder, only=self._rest())
            weights = Weights(self._model, shards, owners(self._model, shards.names), self._device)
            weights.load([name for name in held(self._model) if name not in placed])
        except CalibrationError as error:
            raise UserError(str(error)) from None

    def activations(self) -> None:
        """Round what enters each quantized layer as its scheme says."""
        stacks: dict[str, dict[tuple[str, int], Round]] = {}
        for module, tensors in self._stored.items():
            row = row_of(self._schemes[module]).activations
            if row.kind == "none":
                continue
            named = next((stored.name for stored in tensors if stored.role == "input_scale"), None)
            scale = None if named is None else self._tensor(named).float().reshape(())
            rounded = partial(round_activations, activations=row, input_scale=scale)
            stack = self._stack(module)
            if stack is None:
                self._model.get_submodule(self._inside[module]).register_forward_pre_hook(_entering(rounded))
            else:
                place = self._place(module)
                stacks.setdefault(stack, {})[place.parameter, place.expert] = rounded
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

    def _rest(self) -> list[str] | None:
        """Tensors that are loaded as they are; None for all of a model that is not quantized."""
        if not self._stored:
            return None
        taken = {stored.name for tensors in self._stored.values() for stored in tensors}
        taken |= {f"{module}.weight" for module in self._ours}
        taken |= {name for names in self._kv_names.values() for name in names}
        return [name for name in self._checkpoint.tensors if name not in taken]

    def _fill(self, module: str) -> str:
        """Put a module's weight in its place; returns the name of the parameter."""
        stack, weight = self._stack(module), self._weight(module)
        if stack is None:
            inside = self._inside[module]
            self._model.get_submodule(inside).weight = torch.nn.Parameter(weight, requires_grad=False)
            return f"{inside}.weight"
        place, experts = self._place(module), self._model.get_submodule(stack)
        if getattr(experts, place.parameter).is_meta:
            empty = torch.empty_like(getattr(experts, place.parameter), device=self._device)
            setattr(experts, place.parameter, torch.nn.Parameter(empty, requires_grad=False))
        place.of(getattr(experts, place.parameter)).copy_(weight)
        return f"{stack}.{place.parameter}"

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


def _entering(rounded: Round) -> Any:
    def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounded(inputs[0]).to(inputs[0].dtype), *inputs[1:])

    return hook


def round_inputs(module: Any, rounds: Mapping[tuple[str, int], Round]) -> tuple[Any, Any]:
    """Round what enters a module that stacks experts; ``rounds`` are by parameter and number of the expert.

    Returns the handles of its hooks.
    """
    return taking_inputs(module, lambda key, one, rows: rounds[key, one](rows) if (key, one) in rounds else rows)
