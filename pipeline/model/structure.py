"""Which tensors of a checkpoint are weights of linear modules, and which modules are attention.

The model is built on the meta device from its configuration, so that module types decide and not a pattern over
names. Names on disk are followed to the module's own by the renaming rules that transformers itself loads the
checkpoint with; a checkpoint stores a mixture's experts one by one where the module holds them stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.formats.checkpoint import SINGLE_NAME, Checkpoint, read_json
from pipeline.formats.header import TensorInfo, tensor_bytes

if TYPE_CHECKING:
    import torch

_PACKED = "weight_packed"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the 16-bit weight [O, I] of one linear module comes from.

    ``tensor`` is a name on disk. ``expert`` picks an entry of the first dimension of a tensor that stacks experts,
    ``rows`` the output rows [first, last) of that matrix (gate and up lie in one), and ``transposed`` says that it is
    stored as [I, O]. ``scale`` names the tensor of block scales that an FP8 source is multiplied with.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's parts under their names on disk.

    ``linear`` are the modules that schemes apply to, with [out_features, in_features]; ``kept`` the modules with a
    two-dimensional weight that stay in 16 bit (output head, routers), with the head also where it shares the
    embedding's tensor; ``attention`` the attention modules in order of their layer; ``parameters`` counts all elements
    of the model.
    """

    linear: Mapping[str, tuple[int, int]]
    kept: tuple[str, ...]
    attention: tuple[str, ...]
    parameters: int


def read_structure(folder: Path, names: Iterable[str], *, trust_remote_code: bool = False) -> Structure:
    """Read a model's structure from its ``config.json``, for the tensors ``names`` that are on disk.

    Raises `UserError` where transformers does not know the architecture.
    """
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    rename = _renamer(model)
    return _structure(model, {name: rename(_as_weight(name)) for name in names})


def imagine(folder: Path, *, trust_remote_code: bool = False) -> tuple[Checkpoint, Structure]:
    """The bfloat16 checkpoint that a model's ``config.json`` stands for, in one file, and its structure.

    For planning where the weights are not here: sizes are exact, names are the module's own, with experts one by one.
    """
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    owners: dict[str, str] = {}
    position = 0
    for name, own, shape in _unstacked(model):
        end = position + tensor_bytes("BF16", shape)
        tensors[name] = (SINGLE_NAME, TensorInfo(name, "BF16", shape, position, end))
        owners[name] = own
        position = end
    config = read_json(folder / "config.json")
    return Checkpoint(folder, config, (SINGLE_NAME,), tensors), _structure(model, owners)


def _structure(model: Any, owners: Mapping[str, str]) -> Structure:
    """Sort the tensors on disk by the parameter of the model that each of them becomes (a part of)."""
    import torch

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    linear: dict[str, tuple[int, int]] = {}
    kept: set[str] = set()
    for name, own in owners.items():
        module_name, _, suffix = name.rpartition(".")
        owner, parameter = modules.get(own.rpartition(".")[0]), parameters.get(own)
        if suffix not in ("weight", _PACKED) or (owner is embeddings and owner is not head):
            continue
        if owner is head:
            kept.add(module_name)
        elif parameter is None or parameter.ndim < 2:
            continue
        elif isinstance(owner, torch.nn.Linear):
            linear[module_name] = (owner.out_features, owner.in_features)
        elif parameter.ndim == 3:
            linear[module_name] = _expert_shape(module_name, own, parameter)
        else:
            kept.add(module_name)
    if not any(modules.get(own.rpartition(".")[0]) is head for own in owners.values()):
        # A head that is tied to the embedding has no tensor of its own, but servers and libraries look for its name.
        kept |= {name for name, module in modules.items() if module is head}
    return Structure(
        linear=linear,
        kept=tuple(sorted(kept)),
        attention=tuple(_attention(model)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _as_weight(name: str) -> str:
    """The name that a packed weight would have in 16 bit, which is what the renaming rules know."""
    return f"{name.removesuffix(_PACKED)}weight" if name.endswith(_PACKED) else name


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


def _unstacked(model: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name on disk, parameter and shape of each tensor that a checkpoint would have, experts one by one."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for own, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        if own in tied:
            continue
        if len(shape) != 3 or ".experts." not in own:
            yield own, own, shape
            continue
        prefix, _, projection = own.rpartition(".")
        stacked = projection == "gate_up_proj"
        for expert in range(shape[0]):
            for part in ("gate_proj", "up_proj") if stacked else (projection,):
                rows = shape[1] // 2 if stacked else shape[1]
                yield f"{prefix}.{expert}.{part}.weight", own, (rows, shape[2])


def _attention(model: Any) -> list[str]:
    found = [
        (module.layer_idx, name)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    ]
    return [name for _, name in sorted(found)]
