"""Ask vLLM's loaders about modules, once for each kind: modules whose names differ in numbers alone are alike.

LoaderKinds(load_view(config)).is_quantizable("model.layers.0.mlp.up_proj")
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quantmint.pipeline.quantize.model.loader import LoaderView

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def kind_of(module: str) -> str:
    """Return a module's name with * for each number in it."""
    return _NUMBER.sub("*", module)


class LoaderKinds:
    """The answers of a `LoaderView` by kind of module; None stands for an architecture that vLLM does not have."""

    def __init__(self, view: LoaderView | None) -> None:
        self._view = view
        self._quantizable: dict[str, bool | None] = {}
        self._absorbed: dict[str, bool] = {}

    def quantizes(self, module: str) -> bool:
        """Return whether vLLM builds a module with a quantization."""
        return self._view is not None and self._view.quantizes(module)

    @property
    def predicts_in_layers(self) -> bool:
        """Return whether vLLM names the modules of a multi-token predictor like layers behind the model's last one."""
        return self._view is not None and self._view.predicts_in_layers

    def is_quantizable(self, module: str) -> bool | None:
        """Return whether vLLM asks for a quantization of a module; None where that is unknown.

        Of modules whose names differ in numbers alone, the first decides.
        """
        kind = kind_of(module)
        if kind not in self._quantizable:
            self._quantizable[kind] = None if self._view is None else self._view.is_quantizable(module)
        return self._quantizable[kind]

    def is_absorbed(self, module: str) -> bool:
        """Return whether vLLM folds a module into its neighbours when it loads it."""
        kind = kind_of(module)
        if kind not in self._absorbed:
            self._absorbed[kind] = self._view is not None and self._view.absorbs(module)
        return self._absorbed[kind]

    def aliases(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the names by which vLLM asks for modules, for those that it asks for under another name or under none.

        A kind of module, by its name without numbers, is left out once one of its modules has its own name.
        """
        view, aliases = self._view, dict[str, tuple[str, ...]]()
        plain: set[str] = set()  # kinds whose modules have no other names
        for module in modules if view is not None else ():
            kind = kind_of(module)
            if view is None or kind in plain:
                continue
            names = view.listed_names(module)
            if names == (module,):
                plain.add(kind)
            else:
                aliases[module] = names
        return aliases

    def joined(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the kinds of modules behind whose rows vLLM puts others, with the last names of all in the matrix.

        Of each kind the first module decides.
        """
        view, joined, kinds = self._view, dict[str, tuple[str, ...]](), set[str]()
        for module in modules if view is not None else ():
            kind = kind_of(module)
            if view is None or kind in kinds:
                continue
            kinds.add(kind)
            if view.precedes(module):
                joined[kind] = tuple(sorted({name.rpartition(".")[2] for name in view.fusion_group(module)}))
        return joined
