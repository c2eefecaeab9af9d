"""Contradictions between a model's configuration and the tensors of its release: missing ones, and ones of no module.

Each is a rule, the name of a tensor, and words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from quantmint.pipeline.quantize.model.builder import stored_tensors
from quantmint.pipeline.quantize.model.encodings import LEFTOVERS
from quantmint.pipeline.quantize.model.experts import missing_experts, stacks_experts
from quantmint.pipeline.quantize.model.roles import Predictor

Fault = tuple[str, str, str]


def missing_tensors(
    model: Any, stored_by: Mapping[str, list[str]], owners: Mapping[str, Any], locate: Callable[[str], str]
) -> Iterator[Fault]:
    """Yield a fault for each tensor that transformers would save of ``model`` and that is not stored, under any name.

    ``stored_by`` are the stored tensors by the parameter that they become, ``owners`` the model's modules by name, and
    ``locate`` returns the parameter of a tensor of the release.
    """
    implied, state = stored_tensors(model), model.state_dict().keys()
    stored_names = {name for names in stored_by.values() for name in names}
    stacks: set[str] = set()
    for name in (name for name in implied if name not in stored_names):
        # The rules are for names of releases: DeepSeek V4's would lead the model's own name astray.
        parameter_name = name if name in state else locate(name)
        stored = stored_by.get(parameter_name, [])
        if implied.keys().isdisjoint(stored) and stored:  # the same weights by other names
            owner = owners.get(parameter_name.rpartition(".")[0])
            if parameter_name not in stacks and owner is not None and stacks_experts(owner):
                stacks.add(parameter_name)
                # LongCat counts experts that compute nothing, and have a place in one of two stacks.
                experts = min(p.shape[0] for p in owner.parameters(recurse=False) if p.ndim == 3)
                missing = missing_experts(stored, parameter_name, owner, experts)
                yield from (("missing", each, "config.json implies it, it is not stored") for each in missing)
        else:
            yield "missing", name, f"config.json implies it, {list(implied[name][1])}; it is not stored"


def unexpected_tensors(
    model: Any, stored_by: Mapping[str, list[str]], predictor: Predictor, dropped: Collection[str]
) -> Iterator[Fault]:
    """Yield a fault for each tensor without an owning module, minus the family's known extras and the ``dropped``."""
    state = model.state_dict().keys()
    for parameter_name, names in stored_by.items():
        for name in names if parameter_name not in state else ():
            known = predictor.root(name) is not None or predictor.is_ignored(name)
            if not name.endswith(LEFTOVERS) and not known and name not in dropped:
                yield "undeclared", name, "it is stored, and no module of config.json has it"
