"""Know how vLLM loads a model: the modules that it can quantize, and those that it loads as one.

    >>> view = load_view({"architectures": ["LlamaForCausalLM"]})
    >>> view.fusion_group("model.layers.0.self_attn.q_proj")
    ('model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.k_proj', 'model.layers.0.self_attn.v_proj')
    >>> view.is_quantizable("lm_head")
    False

The answers come from the tables ``loaders/vllm-X.Y.yaml``, one for each version of vLLM, which
``tests/tools/vllm_loaders.py`` writes from vLLM's own classes. Names of modules are those on disk, with numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from quantmint.pipeline.recipe.modules import expert_count, fused_with, siblings, text_config

_TABLES = Path(__file__).with_name("loaders")
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(.+)\.(\d+\.([^.]+))")


@dataclass(frozen=True, slots=True)
class LoaderView:
    """A model as the classes of several vLLM versions see it; where they differ, the most restrictive answer holds.

    ``experts`` and ``layers`` are the numbers of experts and layers by the configuration.
    """

    versions: tuple[_Version, ...]
    experts: int = 0
    layers: int = 0

    def _owners(self, module: str) -> Iterator[_Version]:
        """Yield the row of each version that loads a module: the drafter's for layers of multi-token prediction."""
        return (version.owner(module, self.layers) for version in self.versions)

    def vllm_name(self, module: str) -> str:
        """Return the name in the newest vLLM of the module that loads ``module``, fused or a container of experts.

        A module that vLLM does not have keeps its name, renamed as far as vLLM's rules go.
        """
        version = self.versions[-1].owner(module, self.layers)
        return version.locate(module) or version.rename(module) or module

    def listed_names(self, module: str) -> tuple[str, ...]:
        """Return the names by which a quantization's lists must call a module so that every vLLM knows it.

        This is nearly always the module's own name. Some classes ask under another, which no rename leads to; where a
        class asks under a name without the layer's number, or under none, no name helps, and the result is ().
        """
        names = [version.listed_name(module) for version in self._owners(module)]
        return tuple(dict.fromkeys(name for name in names if name is not None)) if None not in names else ()

    def is_quantizable(self, module: str) -> bool | None:
        """Return whether vLLM asks for a quantization of this module; None where some vLLM has no such module.

        Heads and embeddings are not quantizable: only compressed-tensors has a method for some of them.
        """
        answers = [version.is_quantizable(module) for version in self._owners(module)]
        return False if False in answers else None if None in answers else True

    def quantizes(self, module: str) -> bool:
        """Return whether all vLLM that have this module ask for a quantization of it; False where none has it.

        It is for modules that are listed by a pattern, which also fits the names of fused ones.
        """
        answers = {version.is_quantizable(module) for version in self._owners(module)}
        return True in answers and False not in answers

    def fusion_group(self, module: str) -> tuple[str, ...]:
        """Return the modules on disk that vLLM loads as one with ``module``, itself included.

        They must have one scheme, or stay in 16 bit together. All experts of a layer are one group.
        """
        groups = [version.fusion_group(module, self.experts) for version in self._owners(module)]
        return max(reversed(groups), key=len)

    def precedes(self, module: str) -> tuple[str, ...]:
        """Return the modules whose rows vLLM puts behind those of ``module`` in one matrix.

        The result is () for the last module of a matrix, and for experts.
        """
        groups = [version.row_group(module) for version in self._owners(module)]
        group = max(reversed(groups), key=len)
        return group[group.index(module) + 1 :]

    def absorbs(self, module: str) -> bool:
        """Return whether some vLLM's latent attention multiplies this projection into its neighbours, in 16 bit."""
        return any(version.absorbs(module) for version in self._owners(module))

    @property
    def predicts_in_layers(self) -> bool:
        """Return whether some vLLM builds a multi-token predictor under names of layers behind the model's last one."""
        drafters = (version.drafter for version in self.versions if version.drafter is not None)
        return any(name.startswith("model.layers.") for drafter in drafters for name in drafter.prefixes.values())

    @property
    def has_absorbed(self) -> bool:
        """Return whether some vLLM absorbs projections of this model, see `absorbs`."""
        return any(version.absorbed for version in self.versions)


@dataclass(frozen=True, slots=True)
class _Version:
    """A class's row in one version's table, and its drafter's. The table's head describes the fields."""

    quantized: frozenset[str]
    unquantized: frozenset[str]
    absorbed: frozenset[str]
    experts: Mapping[str, tuple[str, ...]]
    fused: Mapping[str, tuple[str, ...]]
    unlisted: frozenset[str]
    renames: tuple[tuple[str | None, ...], ...]
    listed: tuple[tuple[str | None, ...], ...]
    moves: Mapping[str, str]
    prefixes: Mapping[str, str]
    skipped: frozenset[str]
    drafter: _Version | None
    place: str
    generic: bool

    def owner(self, module: str, layers: int) -> _Version:
        """Return the drafter's row for a module in a layer for multi-token prediction, else this row.

        ``layers`` is the model's number of layers; layers behind the last one are the drafter's.
        """
        if self.drafter is None:
            return self
        if self.drafter.place == "model":  # its layers follow the last one
            number = _LAYER.search(module)
            return self.drafter if number and layers and int(number[1]) >= layers else self
        return self.drafter if f".{self.drafter.place}" in f".{module}" else self

    def rename(self, module: str) -> str | None:
        """Return a module's name after all renames; None where vLLM skips its weight."""
        name = _renamed(f"{module}.weight", self.renames)
        return None if name is None else _replaced(name.removesuffix(".weight"), self.moves)

    def locate(self, module: str) -> str | None:
        """Return the name of the vLLM module that loads ``module``; None where there is none."""
        name = None if _pattern(module) in self.skipped else self.rename(module)
        if name is None or self._has(name):
            return name
        lasts = {name.rpartition(".")[2], module.rpartition(".")[2]}
        for fused, parts in self.fused.items():
            candidate = _beside(name, fused.rpartition(".")[2])
            if (
                fused in (candidate.rpartition(".")[2], _pattern(candidate))
                and self._has(candidate)
                and not lasts.isdisjoint(part.rpartition(".")[2] for part in parts)
            ):
                return candidate
        expert = _EXPERT.fullmatch(name)
        return expert[1] if expert and _pattern(expert[1]) in self.experts else None

    def _has(self, name: str) -> bool:
        pattern = _pattern(name)
        return pattern in self.quantized or pattern in self.unquantized

    def listed_name(self, module: str) -> str | None:
        """Return the name by which this version's lists must call a module; None where no name reaches it.

        A module that the class does not have, or does not quantize, keeps its own name.
        """
        name = self.locate(module)
        if name is None or _pattern(name) in self.unquantized:
            return module
        target = _replaced(name, self.prefixes)
        if _pattern(name) in self.experts:
            expert = _EXPERT.fullmatch(module)
            target = f"{target}.{expert[2]}" if expert else target
        elif name != self.rename(module) and _pattern(name) not in self.unlisted:
            target = _beside(target, module.rpartition(".")[2])
        if "*" in target or target.startswith(".") or not target:
            return None
        for candidate in (module, target):
            # compressed-tensors renames names with a dot alone.
            if (_renamed(candidate, self.listed) if "." in candidate else candidate) == target:
                return candidate
        return None

    def is_quantizable(self, module: str) -> bool | None:
        """Return whether this version asks for a quantization of a module; None where the class has no such module."""
        name = self.locate(module)
        return None if name is None else _pattern(name) not in self.unquantized

    def fusion_group(self, module: str, experts: int) -> tuple[str, ...]:
        """Return the modules on disk that this version loads as one with a module, itself included."""
        name = self.locate(module)
        if name is None:
            return (module,)
        pattern = _pattern(name)
        expert = _EXPERT.fullmatch(module) if pattern in self.experts else None
        if expert and not self._has(self.rename(module) or ""):
            return _expert_group(expert[1], experts, self.experts[pattern])
        return self.row_group(module)

    def row_group(self, module: str) -> tuple[str, ...]:
        """Return the modules whose rows vLLM puts into one matrix with those of ``module``, in their order there."""
        pattern = _pattern(self.locate(module) or module)
        parts = self.fused.get(pattern) or self.fused.get(pattern.rpartition(".")[2], ())
        group = tuple(_beside(module, part) if "." not in part else _numbered(part, module) for part in parts)
        return group if module in group else (module,)

    def absorbs(self, module: str) -> bool:
        """Return whether this version multiplies a latent attention's projection into its neighbours, in 16 bit."""
        name = self.locate(module)
        return name is not None and _pattern(name) in self.absorbed


def fusion_names(module: str, view: LoaderView | None) -> tuple[str, ...]:
    """Return the names of the groups of modules that vLLM loads as one with this module; none for a module of its own.

    The first is `fused_with`'s, which follows from the module's name; the second is there only if vLLM's class takes
    more modules into the group than that name says.
    """
    by_name = fused_with(module)
    names = () if by_name is None else (by_name,)
    if view is None or (by_name is not None and by_name.endswith(".*")):  # all experts of a layer
        return names
    group = view.fusion_group(module)
    if set(group) <= set(siblings(module)):
        return names
    parents = {member.rpartition(".")[0] for member in group}
    lasts = ", ".join(member.rpartition(".")[2] for member in group)
    return (*names, f"{parents.pop()}.{{{lasts}}}" if len(parents) == 1 else ", ".join(group))


def load_view(config: Mapping[str, Any], version: str | None = None) -> LoaderView | None:
    """Return how vLLM loads the class that a ``config.json`` names; None for a class that no table has.

    ``version`` names one version of vLLM ("0.32", "0.32.0"); without it all tables count.
    """
    wanted = None if version is None else ".".join(version.split(".")[:2])
    names = config.get("architectures") or ()
    rows = [_row(number, name) for number in _versions() if wanted in (None, number) for name in names[:1]]
    known = [row for row in rows if row is not None]
    # Nobody serves a model with an older version's Transformers backend once vLLM has a class of its own for it.
    known = [row for at, row in enumerate(known) if not row.generic or all(later.generic for later in known[at:])]
    layers = text_config(config).get("num_hidden_layers")
    return LoaderView(tuple(known), expert_count(config), layers if isinstance(layers, int) else 0) if known else None


def architectures(version: str | None = None) -> Iterator[str]:
    """Yield the sorted names of the classes in the table of ``version`` ("0.32"), or in any table for None."""
    numbers = [number for number in _versions() if version in (None, number)]
    yield from sorted({name for number in numbers for name in _sections(number)})


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of vLLM that have a table, the oldest first."""
    numbers = [path.stem.removeprefix("vllm-") for path in _TABLES.glob("vllm-*.yaml")]
    return tuple(sorted(numbers, key=lambda number: [int(part) for part in number.split(".")]))


@cache
def _sections(version: str) -> Mapping[str, str]:
    """Return the YAML text of each class's row: a table is long, and a model needs two rows of it."""
    text = (_TABLES / f"vllm-{version}.yaml").read_text(encoding="utf-8")
    _, _, text = text.partition("\narchitectures:\n")
    text, _, _ = text.partition("\nfailures:")
    return dict(re.findall(r"^  (\w+):\n((?:    .*\n?)+)", text, re.M))


@cache
def _row(version: str, architecture: str) -> _Version | None:
    section = _sections(version).get(architecture)
    if section is None:
        return None
    row: Mapping[str, Any] = yaml.safe_load(section)
    drafter, renames = row.get("drafter"), _rules(row.get("renames", ()))
    return _Version(
        quantized=frozenset(row.get("quantized", ())),
        unquantized=frozenset(row.get("unquantized", ())),
        absorbed=frozenset(row.get("absorbed", ())),
        experts={name: tuple(parts) for name, parts in row.get("experts", {}).items()},
        fused={name: tuple(parts) for name, parts in row.get("fused", {}).items()},
        unlisted=frozenset(row.get("unlisted", ())),
        renames=renames,
        listed=_rules(row["listed"]) if "listed" in row else renames,
        moves=row.get("moves", {}),
        prefixes=row.get("prefixes", {}),
        skipped=frozenset(row.get("skipped", ())),
        drafter=_row(version, drafter) if drafter not in (None, architecture) else None,
        place=row.get("place", ""),
        generic=row.get("generic", False),
    )


def _rules(rows: Any) -> tuple[tuple[str | None, ...], ...]:
    return tuple(tuple(row) for row in rows)


@cache
def _expert_group(container: str, experts: int, parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{container}.{number}.{part}" for number in range(experts) for part in parts)


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _beside(module: str, last: str) -> str:
    """Return a module's name with ``last`` as its last part."""
    parent = module.rpartition(".")[0]
    return f"{parent}.{last}" if parent else last


def _numbered(pattern: str, module: str) -> str:
    """Return a pattern with each * replaced by the next number in a module's name; a * without a number stays."""
    numbers = iter(_NUMBER.findall(module))
    return re.sub(r"\*", lambda _: next(numbers, "*"), pattern)


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    """Return a name with its longest beginning that is a key of ``beginnings`` replaced by the value."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        beginning = ".".join(parts[:count])
        if (target := beginnings.get(_pattern(beginning))) is not None:
            return ".".join(filter(None, (_numbered(target, beginning), *parts[count:])))
    return name


def _renamed(name: str, rules: tuple[tuple[str | None, ...], ...]) -> str | None:
    """Return a name after vLLM's renames; None where a rule drops it (vLLM 0.32 models/utils.py, WeightsMapper)."""
    for kind, source, target, *within in rules:
        opening = re.match(re.escape(f"{within[0]}.").replace(r"\*", r"\d+"), name) if within else None
        if within and not opening:
            continue
        start = opening[0] if opening else ""
        rest = _changed(str(kind), str(source), target, name[len(start) :])
        if rest is None:
            return None
        name = start + rest
    return name


def _changed(kind: str, source: str, target: str | None, name: str) -> str | None:
    hit = {
        "regex": lambda: re.search(source, name) is not None,
        "text": lambda: source in name,
        "prefix": lambda: name.startswith(source),
        "suffix": lambda: name.endswith(source),
    }[kind]()
    if not hit or target is None:
        return None if hit else name
    if kind == "regex":
        return re.sub(source, target, name)
    if kind == "suffix":
        return name.removesuffix(source) + target
    return name.replace(source, target, 1)
