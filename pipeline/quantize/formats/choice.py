"""The choice of what is quantized in a model: schemes, exceptions, and the names by which servers are told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of what is quantized in a model: schemes by module, modules that stay in 16 bit, and the KV cache.

    ``schemes`` maps each quantized linear module to its scheme; ``kept`` are the modules with a two-dimensional weight
    that stay in 16 bit, routers included, because vLLM must be told about each of them; ``kv_cache`` is whether static
    FP8 scales are stored for the attention modules, ``kv_per_head`` whether there is one for each KV head; ``prefixes``
    are what the names of a multi-token predictor's modules begin with, ``aliases`` the names by which vLLM asks for
    modules, where they are not their own. ``predictor`` are the quantized modules of the predictor, ``stored`` the
    quantized modules whose bytes are those of the source, which has them in their scheme already, and ``heads`` a
    quantized output head, whose class is not that of linear layers in servers.
    """

    schemes: Mapping[str, str]
    kept: tuple[str, ...]
    kv_cache: bool
    kv_per_head: bool = False
    prefixes: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    predictor: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()

    def named(self, modules: Iterable[str]) -> list[str]:
        """Return the names of ``modules`` and all aliases by which vLLM asks for them, sorted."""
        return sorted({name for module in modules for name in (module, *self.aliases.get(module, ()))})

    @property
    def ignored(self) -> list[str]:
        """Return the names, and patterns after ``re:``, of the modules for which servers must not look for scales.

        Servers build the modules of a multi-token predictor under names of their own, which begin like those on disk.
        """
        return self.named(self.kept) + [
            f"re:{pattern}" for prefix in self.prefixes for pattern in self._unquantized(prefix)
        ]

    def _unquantized(self, prefix: str) -> Iterator[str]:
        """Yield a pattern for what stays in 16 bit of a predictor: all of it, or the modules that are not quantized."""
        beginning = f"(.*\\.)?{re.escape(prefix)}"
        if not any(_below(module, prefix) for module in self.predictor):
            yield f"{beginning}.*"
        elif names := {name for module in self.kept if (name := _below(module, prefix))}:
            # vLLM asks for the head of DeepSeek's layers without the module around it.
            heads = {name.replace("shared_head.head", "head") for name in names if name.endswith("shared_head.head")}
            yield f"{beginning}({'|'.join(_kinds(names | heads))})$"

    @property
    def model_schemes(self) -> dict[str, str]:
        """Return the schemes of the model's own modules, by name, without those of its predictor."""
        return {module: scheme for module, scheme in self.schemes.items() if module not in self.predictor}

    def predicted(self, scheme: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each prefix of a predictor with modules in ``scheme``, and regular expressions of what follows it.

        That is ``.*`` where all quantized modules of the predictor have this scheme; `ignored` takes the others out.
        """
        for prefix in self.prefixes:
            modules = {name: module for module in self.predictor if (name := _below(module, prefix))}
            names = [name for name, module in modules.items() if self.schemes[module] == scheme]
            if names:
                yield prefix, (".*",) if len(names) == len(modules) else tuple(_kinds(names))

    @property
    def default(self) -> str:
        """Return the scheme of the most modules of the model."""
        return most_frequent(self.model_schemes.values())


def _below(module: str, prefix: str) -> str:
    """Return what follows a predictor's ``prefix`` in a module's name; empty for a module that is not below it."""
    return f".{module}".partition(f".{prefix}")[2]


def _kinds(names: Iterable[str]) -> list[str]:
    """Return sorted regular expressions of names, in which any number stands for a number."""
    return sorted({re.sub(r"(^|(?<=\.))\d+(?=\\\.|$)", r"\\d+", re.escape(name)) for name in names})


def most_frequent(names: Iterable[str]) -> str:
    """Return the most frequent of ``names``; among equals the first in alphabetical order."""
    names = list(names)
    return max(sorted(set(names)), key=names.count)
