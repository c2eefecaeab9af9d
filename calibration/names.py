"""Names on disk for what a model calls otherwise.

Ranges are kept under the names of the checkpoint, because those are what a quantized checkpoint and a server know. The
rules from one to the other are the ones that transformers itself loads the checkpoint with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}
"""What servers call the projections that one stacked parameter holds, where its own name does not say."""


def owners(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The parameter or buffer of the model that each tensor on disk becomes (a part of); without those of no use."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, str] = {}
    for name in names:
        renamed = rename_source_key(name, renamings, converters, prefix, own)[0]
        if renamed not in own and name in own:
            renamed = name  # a rule for another layout of the same model
        if renamed in own:
            found[name] = renamed
    return found


def sources(model: Any, owned: Mapping[str, str]) -> dict[str, str]:
    """For each linear module on disk, the name under which its input was measured.

    That is the model's own module, or parameter and number for one of several stacked experts. A stack on disk counts
    as the single experts that servers know: ``experts.3.gate_proj`` for a part of ``experts.gate_up_proj``.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, str] = {}
    for name, own in owned.items():
        module, parameter = name.removesuffix(".weight"), parameters.get(own)
        if parameter is None or parameter.ndim not in (2, 3):
            continue
        if parameter.ndim == 2:
            if name.endswith(".weight"):
                found[module] = own.removesuffix(".weight")
            continue
        prefix, _, last = module.rpartition(".")
        number = prefix.rpartition(".")[2]
        if number.isdigit() and ".experts." in f".{prefix}.":
            found[module] = f"{own}.{number}"
            continue
        for expert in range(parameter.shape[0]):
            for part in _PARTS.get(last, (last,)):
                found[f"{prefix}.{expert}.{part}"] = f"{own}.{expert}"
    return found


def on_disk(own: str, owned: Mapping[str, str]) -> str:
    """The name on disk of a module of the model: that of its first tensor, less what both names share behind it."""
    for name, parameter in owned.items():
        inner = parameter.removeprefix(f"{own}.")
        if inner != parameter and name.endswith(f".{inner}"):
            return name.removesuffix(f".{inner}")
    return own


def experts_on_disk(named: Mapping[str, str]) -> dict[str, str]:
    """Single experts by the model's own name (``LAYER.experts.3``), with theirs on disk; from `sources`."""
    found: dict[str, str] = {}
    for disk, own in named.items():
        prefix, _, last = own.rpartition(".")
        # One of a stack is PREFIX.gate_up_proj.3, one of a list PREFIX.3.gate_proj.
        expert = f"{prefix.rpartition('.')[0]}.{last}" if last.isdigit() else prefix
        found[expert] = disk.rpartition(".")[0]
    return found
