"""Load a checkpoint as a transformers model with dequantized weights and simulated activations."""

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
from quantmint.pipeline.base.schemes import (
    ELEMENT_KINDS,
    ActivationFormat,
    MxScales,
    activations_on,
    has_mx_activations,
)
from quantmint.pipeline.base.schemes import scheme as row_of
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, Reader, open_checkpoint
from quantmint.pipeline.quantize.formats.layout import Claims, layout_of
from quantmint.pipeline.quantize.inspection.findings import check_structure, expected_tensors
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.experts import ExpertSlice, expert_slice
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.rounding import Scales, round_activations
from quantmint.pipeline.quantize.schemes.registry import dequantize
from quantmint.pipeline.quantize.schemes.scales import MX_GROUP
from quantmint.pipeline.recipe.modules import text_config

_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A loaded model; ``kv_scales`` is empty without a quantized cache, ``runtime`` is its arithmetic in words."""

    model: Any
    device: str
    kv_scales: Scales
    runtime: str

    @property
    def kv_cache_dtype(self) -> str:
        """The type of the KV cache in vLLM's terms: "fp8" or "auto"."""
        return "fp8" if self.kv_scales else "auto"


def load(folder: Path, device: str, *, trust_remote_code: bool = False, mx_scales: MxScales = "even") -> ReferenceModel:
    """Load a model or checkpoint onto a device in float32; ``mx_scales`` rounds the scales of MX inputs.

    Raises `UserError` for a checkpoint that is incomplete, contradicts its configuration, or cannot be represented.
    """
    checkpoint = open_checkpoint(folder)
    structure = read_structure(folder, checkpoint.tensors, trust_remote_code=trust_remote_code)
    structure.require_whole(folder)
    claims = _claims(checkpoint, structure)
    model = meta_model(folder, trust_remote_code=trust_remote_code).float().eval()
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    state = next((kind for kind in kinds if any(word in kind for word in _RECURRENT)), None)
    if state is not None or getattr(model, "_is_stateful", False):
        raise _unsupported(folder, f"its layers keep a state ({state or 'stateful'}), which padding would change")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # one GEMM for each expert, whose inputs hooks can round
    loader = CheckpointLoader(checkpoint, structure, claims, model, device)
    loader.mx_scales = mx_scales
    loader.load_weights()
    loader.round_activations()
    schemes = sorted({scheme for scheme in claims.schemes.values() if scheme is not None})
    words = runtime_words(schemes, fp8_cache=claims.kv_cache, mx_scales=mx_scales)
    return ReferenceModel(model, device, loader.kv_scales(), words)


def _claims(checkpoint: Checkpoint, structure: Structure) -> Claims:
    """Return the schemes that the configuration claims. Raises `UserError` as in `load`."""
    if structure.quantized_by is None:
        return Claims({}, {}, kv_cache=False)
    form = layout_of(checkpoint.config)
    declared: Mapping[str, Any] = checkpoint.config["quantization_config"]
    if (declared.get("transform_config") or {}).get("config_groups"):
        raise _unsupported(checkpoint.folder, "its transform_config rotates activations when the model runs")
    claims = form.claims(declared, [*structure.linear, *structure.kept])
    if claims.unknown:
        module, scheme = next(iter(claims.unknown.items()))
        raise _unsupported(checkpoint.folder, f"quantmint does not know the scheme of {module} ({scheme})")
    rank = text_config(checkpoint.config).get("kv_lora_rank")
    if claims.kv_cache and rank is not None:
        raise _unsupported(checkpoint.folder, f"it has an FP8 cache for latent attention (kv_lora_rank {rank})")
    finding = next(check_structure(checkpoint, structure, claims), None)
    if finding is not None:
        raise UserError(
            f"{checkpoint.folder}: its tensors contradict its configuration: {finding.where}: {finding.message}",
            hint="`quantmint inspect` lists all such findings.",
        )
    return claims


def _unsupported(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder}: the reference runtime cannot represent this checkpoint: {why}.",
        hint="Use evaluation.runtime: vllm.",
    )


def reference_version() -> str:
    """Return the library and its version: "transformers 5.17.0"."""
    return f"transformers {versions('transformers')['transformers']}"


def runtime_words(schemes: Iterable[str], *, fp8_cache: bool, mx_scales: MxScales = "even") -> str:
    """Return the arithmetic for a checkpoint with these schemes, in words; no schemes mean 16-bit weights."""
    rows = [row_of(scheme) for scheme in schemes]
    rounded = [row.activations for row in rows if row.activations.kind != "none"]
    kinds = list(
        dict.fromkeys(("MX" if a.group == MX_GROUP else "") + ELEMENT_KINDS[a.dtype] for a in rounded if a.dtype)
    )
    words = [f"{reference_version()} in float32", "dequantized weights" if rows else "16-bit weights"]
    if kinds:
        words.append(f"simulated {' and '.join(kinds)} activations")
    if mx_scales != "even" and has_mx_activations(row.name for row in rows):
        words.append(f"MX scales rounded {mx_scales}")
    if fp8_cache:
        words.append("FP8 KV cache")
    return ", ".join(words)


Round = Callable[["torch.Tensor"], "torch.Tensor"]


class CheckpointLoader:
    """Loads a checkpoint into a model on the meta device, in the model's dtype; the checkpoint has been checked."""

    def __init__(self, checkpoint: Checkpoint, structure: Structure, claims: Claims, model: Any, device: str) -> None:
        self._checkpoint, self._inside, self._model, self._device = checkpoint, structure.modules, model, device
        self.mx_scales: MxScales = "even"
        self._read, self._kv_names = Reader(checkpoint), {}
        self._schemes = {module: scheme for module, scheme in claims.schemes.items() if scheme is not None}
        self._stored = expected_tensors(checkpoint, structure, claims) if self._schemes else {}
        if claims.kv_cache:
            form = layout_of(checkpoint.config)
            self._kv_names = {attention: form.kv_scale_names(attention) for attention in structure.attention}

    def load_weights(self) -> None:
        """Load every weight onto the device. Raises `UserError` when one is missing."""
        settle_buffers(self._model, self._device)
        try:
            shards = _Dequantized(self._checkpoint.folder, self._unquantized(), list(self._stored), self._weight)
            owned = owners(self._model, shards.names)
            # transformers has no rule to stack single experts of models whose releases store them stacked.
            unowned = {name.removesuffix(".weight") for name in shards.names if name not in owned}
            stacked = {self._fill_expert(module) for module in self._inside if module in unowned}
            weights = Weights(self._model, shards, owned, self._device)
            weights.load([name for name in held(self._model) if name not in stacked])
        except CalibrationError as error:
            raise UserError(str(error)) from None

    def round_activations(self) -> None:
        """Register hooks that round the inputs of each quantized layer as its scheme specifies."""
        stacks: dict[str, dict[tuple[str, int], Round]] = {}
        layers: dict[str, tuple[ActivationFormat, torch.Tensor | None]] = {}
        rename = Renaming(self._model)
        for module, tensors in self._stored.items():
            served = row_of(self._schemes[module])
            row = activations_on(served.name, self.mx_scales)
            if row.kind == "none":
                continue
            named = next((stored.name for stored in tensors if stored.role == served.input_scale_role), None)
            scale = None if named is None else self._tensor(named).float().reshape(())
            if (stack := self._stack(module)) is not None:
                part = self._slice(module)
                stacks.setdefault(stack, {})[part.parameter, part.expert] = _rounding(row, scale)
                continue
            # One module on disk may be several of the model's layers, or several modules one layer. Of several input
            # scales vLLM takes the largest.
            for target in rename.targets(f"{module}.weight"):
                layer = target.removesuffix(".weight")
                earlier = layers[layer][1] if layer in layers else None
                layers[layer] = row, scale if scale is None or earlier is None else torch.maximum(scale, earlier)
        for layer, (row, scale) in layers.items():
            self._model.get_submodule(layer).register_forward_pre_hook(_input_hook(_rounding(row, scale)))
        for stack, rounds in stacks.items():
            round_inputs(self._model.get_submodule(stack), rounds)

    def kv_scales(self) -> Scales:
        """Return the scales of K and V by layer index, each [1] or [heads, 1, 1]; empty without a quantized cache."""
        return {
            self._model.get_submodule(self._inside[attention]).layer_idx: (self._kv_scale(key), self._kv_scale(value))
            for attention, (key, value) in self._kv_names.items()
        }

    def _kv_scale(self, name: str) -> torch.Tensor:
        scale = self._tensor(name).float()
        return scale.reshape(1) if scale.numel() == 1 else scale.reshape(-1, 1, 1)

    def _unquantized(self) -> list[str] | None:
        """Return the tensors to load as they are stored; None for all tensors of a model that is not quantized."""
        if not self._stored:
            return None
        quantized = {stored.name for tensors in self._stored.values() for stored in tensors}
        quantized |= {name for names in self._kv_names.values() for name in names}
        return [name for name in self._checkpoint.tensors if name not in quantized]

    def _fill_expert(self, module: str) -> str:
        """Copy a single expert's weight into the stacked parameter; return the parameter's name."""
        name, part = self._inside[module].rsplit(".", 2)[0], self._slice(module)
        experts = self._model.get_submodule(name)
        if getattr(experts, part.parameter).is_meta:
            empty = torch.empty_like(getattr(experts, part.parameter), device=self._device)
            setattr(experts, part.parameter, torch.nn.Parameter(empty, requires_grad=False))
        part.of(getattr(experts, part.parameter)).copy_(self._weight(module))
        return f"{name}.{part.parameter}"

    def _weight(self, module: str) -> torch.Tensor:
        if module not in self._stored:
            return self._tensor(f"{module}.weight").float()
        parts = {stored.role: self._tensor(stored.name) for stored in self._stored[module]}
        return dequantize(self._schemes[module], parts)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._read(name).to(self._device)

    def _stack(self, module: str) -> str | None:
        """Return the module that stacks this expert with others; None for a module that is not a stacked expert."""
        prefix, _, number = self._inside[module].rpartition(".")[0].rpartition(".")
        if not number.isdigit():
            return None
        experts = self._model.get_submodule(prefix)
        return prefix if any(p.ndim == 3 for p in experts.parameters(recurse=False)) else None

    def _slice(self, module: str) -> ExpertSlice:
        name, number, projection = self._inside[module].rsplit(".", 2)
        return expert_slice(self._model.get_submodule(name), name, int(number), projection)


class _Dequantized(Shards):
    """The tensors of a quantized checkpoint under their 16-bit names, as transformers' loading rules expect them.

    ``unquantized`` tensors are read as stored; the weights of ``modules`` come from ``dequantized(module)``.
    """

    def __init__(
        self,
        folder: Path,
        unquantized: Collection[str] | None,
        modules: Iterable[str],
        dequantized: Callable[[str], torch.Tensor],
    ) -> None:
        super().__init__(folder, only=unquantized)
        self._modules, self._dequantized = {f"{module}.weight": module for module in modules}, dequantized

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, *self._modules)

    def read(self, name: str, device: str) -> torch.Tensor:
        return self._dequantized(self._modules[name]) if name in self._modules else super().read(name, device)


def _rounding(activations: ActivationFormat, input_scale: torch.Tensor | None) -> Round:
    return partial(round_activations, activations=activations, input_scale=input_scale)


def _input_hook(rounded: Round) -> Any:
    def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounded(inputs[0]).to(inputs[0].dtype), *inputs[1:])

    return hook


def round_inputs(module: Any, rounds: Mapping[tuple[str, int], Round]) -> tuple[Any, Any]:
    """Round the inputs of a module that stacks experts; ``rounds`` are by parameter and expert number.

    Return the handles of the hooks.
    """
    return taking_inputs(
        module, lambda key, expert, rows: rounds[key, expert](rows) if (key, expert) in rounds else rows
    )
