"""Tell the roles of a model's modules: routers, stacks of experts, tensors of a predictor.

A router is known by its place: a linear module, or a matrix of its own, beside the experts that it chooses from. The
names of classes are not looked at, since a "gate" is also what forgets a state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantmint.pipeline.quantize.model.experts import holds_experts, stacks_experts


def routers(modules: Mapping[str, Any], layers: str) -> frozenset[str]:
    """Return the names of the modules that choose or weigh experts, of a model's ``modules`` below prefix ``layers``.

    These are the modules beside the experts that have a matrix of their own (router, gate of the shared expert), and
    modules further inside those whose matrix has a row for each expert.
    """
    return frozenset(_routers(modules, layers))


def _routers(modules: Mapping[str, Any], layers: str) -> Iterator[str]:
    for name, module in modules.items():
        count = _expert_count(name, module)
        if count is None or not name.startswith(layers):
            continue
        block, _, experts = name.rpartition(".")
        children = [child for child, _ in modules[block].named_children() if child != experts]
        for child in children:
            for inner, inside in modules[f"{block}.{child}" if block else child].named_modules():
                path = ".".join(filter(None, (block, child, inner)))
                matrix = next((p for p in inside.parameters(recurse=False) if p.ndim == 2), None)
                if matrix is not None and (not inner or len(matrix) == count):
                    yield path


def _expert_count(name: str, module: Any) -> int | None:
    """Return the number of experts that a module stacks or lists; None for any other module."""
    if stacks_experts(module):
        return int(next(p for p in module.parameters(recurse=False) if p.ndim == 3).shape[0])
    # The layers of a decoder are a list of modules too.
    return len(module) if "expert" in name.rpartition(".")[2] and holds_experts(module) else None


class Predictor:
    """Tells the tensors of a multi-token predictor, which transformers does not build, by their names.

    Releases store them as layers behind the last one (DeepSeek, GLM) or below ``mtp.`` (Qwen, MiMo); other names are
    those that the model's class in transformers is told to ignore.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        layers, extra = getattr(text, "num_hidden_layers", None), getattr(text, "num_nextn_predict_layers", None) or 0
        numbers = range(layers, layers + max(extra, 1)) if isinstance(layers, int) else ()
        self._behind = tuple(f"layers.{number}." for number in numbers)
        self._roots = [re.compile(rf"^(?:.*\.)?({re.escape(layer)})") for layer in self._behind[:extra]]
        self._roots.append(re.compile(r"^(?:.*\.)?(mtp(?:_layers|_block)?\.)"))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def root(self, name: str) -> str | None:
        """Return the prefix of a predictor's tensors in ``name``, such as "mtp." or "layers.61."; None if it has none.

        The prefix of the language model in front of it is left out.
        """
        return next((match[1] for root in self._roots if (match := root.search(name))), None)

    def prefixes(self, roots: Collection[str], *, as_layers: bool) -> tuple[str, ...]:
        """Return ``roots``, sorted, and what the names of their modules begin with in a server that builds them.

        With ``as_layers`` the server builds layers behind the model's last one, also of what is stored below ``mtp.``.
        """
        behind = self._behind if as_layers and any(root.startswith("mtp") for root in roots) else ()
        return tuple(sorted({*roots, *behind}))

    def is_ignored(self, name: str) -> bool:
        """Return whether transformers is told to ignore a tensor of this name, or computes it itself."""
        return name.endswith("rotary_emb.inv_freq") or any(pattern.search(name) for pattern in self._ignored)
