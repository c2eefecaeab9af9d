"""Which tensors of a checkpoint are weights of linear modules, and which modules are attention.

The model is built on the meta device from its configuration, so that module types decide and not a pattern over
names. Names on disk are followed to the module's own by the renaming rules that transformers itself loads the
checkpoint with; a checkpoint stores a mixture's experts one by one where the module holds them stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's parts under their names on disk.

    ``linear`` are the modules that schemes apply to, with [out_features, in_features]; ``kept`` the modules with a
    two-dimensional weight that stay in 16 bit (output head, routers); ``attention`` the attention modules in order
    of their layer; ``other_parameters`` counts everything that is neither.
    """

    linear: Mapping[str, tuple[int, int]]
    kept: tuple[str, ...]
    attention: tuple[str, ...]
    parameters: int


def read_structure(folder: Path, names: Iterable[str] | None = None, *, trust_remote_code: bool = False) -> Structure:
    """Read a model's structure from its ``config.json`` alone.

    ``names`` are the tensors on disk where there are any; without them the names follow from the module's, which is
    enough to plan. Raises `UserError` where transformers does not know the architecture.
    """
    import torch

    model = meta_model(folder, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    stored = list(names) if names is not None else _unstacked(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    rename = _renamer(model)
    linear: dict[str, tuple[int, int]] = {}
    kept: set[str] = set()
    for name in stored:
        module_name, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "weight_packed"):
            continue
        own = rename(f"{module_name}.weight")
        owner = modules.get(own.rpartition(".")[0])
        if owner is embeddings and owner is not head:
            continue
        parameter = parameters.get(own)
        if owner is head or parameter is None or parameter.ndim < 2:
            if owner is head:
                kept.add(module_name)
            continue
        if isinstance(owner, torch.nn.Linear):
            linear[module_name] = (owner.out_features, owner.in_features)
        elif parameter.ndim == 3:
            linear[module_name] = _expert_shape(module_name, own, parameter)
        else:
            kept.add(module_name)
    return Structure(
        linear=linear,
        kept=tuple(sorted(kept)),
        attention=tuple(_attention(model)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def meta_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the causal language model of a folder on the meta device: no weights, no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        # A quantized checkpoint is inspected as the model it was made from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder}: transformers cannot build this model from its config.json: {reason}") from None


def _renamer(model: Any) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    own = dict(model.named_parameters(remove_duplicate=False))
    return lambda name: rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0]


def _expert_shape(name: str, own: str, parameter: torch.Tensor) -> tuple[int, int]:
    """The shape of one expert's projection: gate and up are stacked along the output dimension in the module."""
    _, first, second = parameter.shape
    stacked = own.endswith("gate_up_proj") and not name.endswith("gate_up_proj")
    return (first // 2, second) if stacked else (first, second)


def _unstacked(model: Any) -> list[str]:
    """The names that a checkpoint of this model would have, experts one by one."""
    names: list[str] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim == 3 and ".experts." in name:
            prefix, _, projection = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
            names += [f"{prefix}.{expert}.{part}.weight" for expert in range(parameter.shape[0]) for part in parts]
        else:
            names.append(name)
    return names


def _attention(model: Any) -> list[str]:
    found = [
        (module.layer_idx, name)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    ]
    return [name for _, name in sorted(found)]
