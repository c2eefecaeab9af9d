"""How vLLM loads a model: which modules it can quantize, and which it loads as one.

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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.base.data import beside
from pipeline.recipe.modules import expert_count

_TABLES = Path(__file__).with_name("loaders")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"(.+)\.\d+\.([^.]+)")


@dataclass(frozen=True, slots=True)
class LoaderView:
    """A model as vLLM's classes see it; where versions differ, the most restrictive answer holds."""

    versions: tuple[_Version, ...]
    experts: int = 0

    def vllm_name(self, module: str) -> str:
        """Return the name of a module in vLLM: of the fused module or the container of experts that takes it in.

        The newest version's; a module that vLLM does not have keeps its own name, renamed as far as vLLM's rules go.
        """
        version = self.versions[-1]
        return version.locate(module) or version.rename(module) or module

    def is_quantizable(self, module: str) -> bool | None:
        """Return whether vLLM asks for a quantization of this module; None where it has no such module.

        Heads and embeddings are never quantizable: of the two layouts, one quantizes them.
        """
        answers = [version.is_quantizable(module) for version in self.versions]
        return False if False in answers else None if None in answers else True

    def fusion_group(self, module: str) -> tuple[str, ...]:
        """Return the modules on disk that vLLM loads as one with this module, which is among them.

        All experts of a layer are a group. A group of modules that must have one scheme, or stay in 16 bit together.
        """
        groups = [version.fusion_group(module, self.experts) for version in self.versions]
        return max(reversed(groups), key=len)

    def absorbs(self, module: str) -> bool:
        """Return whether latent attention multiplies this projection into its neighbours, in 16 bit."""
        return any(version.absorbs(module) for version in self.versions)


@dataclass(frozen=True, slots=True)
class _Version:
    """The row of one class in one version's table, with the row of its drafter."""

    quantized: frozenset[str] = frozenset()
    unquantized: frozenset[str] = frozenset()
    absorbed: frozenset[str] = frozenset()
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renames: tuple[tuple[str | None, ...], ...] = ()
    moves: Mapping[str, str] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    drafter: _Version | None = None

    def rename(self, module: str) -> str | None:
        """Apply vLLM's renames, in its order, to the module's weight; None where vLLM skips it."""
        name = f"{module}.weight"
        for kind, source, target, *within in self.renames:
            assert kind is not None and source is not None
            prefix = _opening(f"{within[0]}.", name) if within and within[0] else ""
            if prefix is None:
                continue
            changed = _changed(kind, source, target, name[len(prefix) :])
            if changed is None:
                return None
            name = prefix + changed
        return self._move(name.removesuffix(".weight"))

    def _move(self, name: str) -> str:
        """Replace the longest prefix that is among the moves; numbers stay in their order."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            prefix = ".".join(parts[:count])
            target = self.moves.get(_starred(prefix))
            if target is not None:
                numbers = iter(_NUMBER.findall(prefix))
                moved = re.sub(r"\*", lambda _, numbers=numbers: next(numbers, "*"), target)  # type: ignore[misc]
                return ".".join(filter(None, (moved, *parts[count:])))
        return name

    def locate(self, module: str) -> str | None:
        """Return vLLM's module that takes in this one; None where there is none."""
        name = None if _starred(module) in self.skipped else self.rename(module)
        if name is None:
            return None
        if self._has(name):
            return name
        parent, _, last = name.rpartition(".")
        lasts = (last, module.rpartition(".")[2])
        for fused, parts in self.fused.items():
            candidate = f"{parent}.{fused.rpartition('.')[2]}" if parent else fused
            listed = not lasts[0] or any(part.rpartition(".")[2] in lasts for part in parts)
            if listed and fused in (candidate.rpartition(".")[2], _starred(candidate)) and self._has(candidate):
                return candidate
        expert = _EXPERT.fullmatch(name)
        return expert[1] if expert and _starred(expert[1]) in self.experts else None

    def _has(self, name: str) -> bool:
        starred = _starred(name)
        return starred in self.quantized or starred in self.unquantized

    def is_quantizable(self, module: str) -> bool | None:
        name = self.locate(module)
        answer = None if name is None else _starred(name) not in self.unquantized
        later = self.drafter.is_quantizable(module) if self.drafter else None
        return later if answer is None else answer if later is None else answer and later

    def fusion_group(self, module: str, experts: int) -> tuple[str, ...]:
        name = self.locate(module)
        if name is None:
            return self.drafter.fusion_group(module, experts) if self.drafter else (module,)
        starred = _starred(name)
        if starred in self.experts:
            expert = _EXPERT.fullmatch(module)
            return _expert_group(expert[1], experts, self.experts[starred]) if expert else (module,)
        parts = self.fused.get(starred) or self.fused.get(starred.rpartition(".")[2], ())
        group = tuple(_sibling(module, part) for part in parts)
        return group if module in group else (module,)

    def absorbs(self, module: str) -> bool:
        name = self.locate(module)
        return (name is not None and _starred(name) in self.absorbed) or bool(
            self.drafter and self.drafter.absorbs(module)
        )


def load_view(config: Mapping[str, Any], version: str | None = None) -> LoaderView | None:
    """Return the view of the class that a ``config.json`` names, None for a class that no table has.

    ``version`` names one version of vLLM ("0.32", "0.32.1"); without it all tables count.
    """
    wanted = None if version is None else ".".join(version.split(".")[:2])
    rows = [
        row
        for number, table in _tables().items()
        if wanted in (None, number)
        for architecture in (config.get("architectures") or ())[:1]
        if (row := _row(number, architecture)) is not None
    ]
    return LoaderView(tuple(rows), expert_count(config)) if rows else None


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    """All tables by vLLM's version, the oldest first."""
    paths = {path.stem.removeprefix("vllm-"): path for path in _TABLES.glob("vllm-*.yaml")}
    numbers = sorted(paths, key=lambda number: [int(part) for part in number.split(".")])
    return {number: beside(str(paths[number]), paths[number].name) for number in numbers}


@cache
def _row(number: str, architecture: str) -> _Version | None:
    row = _tables()[number]["architectures"].get(architecture)
    if row is None:
        return None
    drafter = row.get("drafter")
    return _Version(
        quantized=frozenset(row.get("quantized", ())),
        unquantized=frozenset(row.get("unquantized", ())),
        absorbed=frozenset(row.get("absorbed", ())),
        experts={name: tuple(parts) for name, parts in row.get("experts", {}).items()},
        fused={name: tuple(parts) for name, parts in row.get("fused", {}).items()},
        renames=tuple(tuple(rule) for rule in row.get("renames", ())),
        moves=row.get("moves", {}),
        skipped=frozenset(row.get("skipped", ())),
        drafter=_row(number, drafter) if drafter and drafter != architecture else None,
    )


@cache
def _expert_group(container: str, experts: int, parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{container}.{number}.{part}" for number in range(experts) for part in parts)


def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def _sibling(module: str, part: str) -> str:
    """The module beside this one that a table calls ``part``: by its last name, or with all of its path."""
    if "." not in part:
        parent = module.rpartition(".")[0]
        return f"{parent}.{part}" if parent else part
    numbers = iter(_NUMBER.findall(module))
    return re.sub(r"\*", lambda _: next(numbers, "*"), part)


def _opening(prefix: str, name: str) -> str | None:
    """The part of a name that a starred prefix stands for; None where the name begins otherwise."""
    found = re.match(re.escape(prefix).replace(r"\*", r"\d+"), name)
    return found[0] if found else None


def _changed(kind: str, source: str, target: str | None, name: str) -> str | None:
    """Apply one rename of vLLM (model_executor/models/utils.py, WeightsMapper); None where it drops the name."""
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


def architectures(version: str | None = None) -> Iterator[str]:
    """Yield the names of the classes in a version's table, or in any."""
    names = {
        name for number, table in _tables().items() if version in (None, number) for name in table["architectures"]
    }
    yield from sorted(names)
