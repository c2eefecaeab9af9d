"""A checkpoint as a model of transformers that computes what the stored bytes stand for.

>>> loaded = load(Path("model-fp8"), "cpu")
>>> loaded.runtime
'transformers 5.17.0 in float32, dequantized weights, simulated FP8 activations, FP8 KV cache'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.schemes import ActivationFormat
from pipeline.base.schemes import scheme as row_of
from pipeline.base.versions import versions
from pipeline.quantize.engines.stream.kernels import MX_GROUP
from pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from pipeline.quantize.formats.known import layout_of
from pipeline.quantize.formats.layout import Claims
from pipeline.quantize.inspection.findings import check_structure
from pipeline.quantize.model.structure import Structure, meta_model, read_structure
from pipeline.recipe.modules import text_config
from pipeline.serving.reference.placing import Placing
from pipeline.serving.reference.rounding import Scales

_NAMES = {"e4m3": "FP8", "int8": "INT8", "e2m1": "FP4", "e2m3": "FP6", "e3m2": "FP6"}
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to answer; ``kv_scales`` are empty where the cache stays as it is.

    ``runtime`` are the words for what computes.
    """

    model: Any
    device: str
    kv_scales: Scales
    runtime: str

    @property
    def kv_cache_dtype(self) -> str:
        """Of the cache that answers are computed with, as vLLM names it: "fp8" or "auto"."""
        return "fp8" if self.kv_scales else "auto"


def load(folder: Path, device: str, *, trust_remote_code: bool = False) -> Loaded:
    """Load a 16-bit model, or a checkpoint in either layout, onto a device, in float32.

    Raises `UserError` for a checkpoint that is not what its configuration promises, and for one that cannot be
    represented: an unknown scheme, rotations that are computed when the model runs, an FP8 cache of latents, layers
    that keep a state.
    """
    checkpoint = open_checkpoint(folder)
    structure = read_structure(folder, checkpoint.tensors, trust_remote_code=trust_remote_code)
    claims = _claims(checkpoint, structure)
    model = meta_model(folder, trust_remote_code=trust_remote_code).float().eval()
    _refuse_states(folder, model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # products of single experts, which can be seen
    placing = Placing(checkpoint, structure, claims, model, device)
    placing.weights()
    placing.activations()
    used = sorted({scheme for scheme in claims.schemes.values() if scheme is not None})
    return Loaded(model, device, placing.kv_scales(), runtime_words(used, fp8_cache=claims.kv_cache))


def _claims(checkpoint: Checkpoint, structure: Structure) -> Claims:
    """What is quantized how; nothing for a model that is in 16 bit, or that is decoded to it."""
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


def _refuse_states(folder: Path, model: Any) -> None:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    state = next((kind for kind in kinds if any(word in kind for word in _RECURRENT)), None)
    if state is not None or getattr(model, "_is_stateful", False):
        raise _unknown(folder, f"its layers keep a state ({state or 'stateful'}), which padding would change")


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
    kinds = list(dict.fromkeys(_kind(row.activations) for row in rows if row.activations.kind != "none"))
    words = [f"{reference_version()} in float32", "dequantized weights" if rows else "16-bit weights"]
    if kinds:
        words.append(f"simulated {' and '.join(kinds)} activations")
    if fp8_cache:
        words.append("FP8 KV cache")
    return ", ".join(words)


def _kind(activations: ActivationFormat) -> str:
    name = _NAMES[activations.dtype or ""]
    return f"MX{name}" if activations.group == MX_GROUP else name
