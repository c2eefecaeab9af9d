"""Turn the facts about a class of vLLM into a row of the table of loaders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_reading import Reading, last, parent


def row(reading: Reading) -> dict[str, Any]:
    """Return the facts about a class as a row of the table."""
    experts: dict[str, list[str]] = {target: [] for target in sorted(reading.experts)}
    fused: dict[str, list[str]] = {}
    unlisted: set[str] = set()
    groups = reading.modules_on_disk()
    for target, modules in groups.items():
        single = sorted({last(module) for module in modules if is_expert(module, target)})
        parts = reading.packed.get(last(target), [])
        if target in reading.experts and single:
            experts[target] = single
        elif target in reading.experts:
            fused[target] = modules
        elif len(modules) > 1:
            modules.sort(key=lambda module: (_position(parts, last(module)), reading.shards[module], module))
            siblings = len({parent(module) for module in modules}) == 1
            fused[target] = [last(module) for module in modules] if siblings else modules
            if sorted(parts) != sorted(last(module) for module in modules):
                unlisted.add(target)
    for target in reading.quantized | reading.unquantized:  # that no tensor of this checkpoint reaches
        if target not in groups and len(reading.packed.get(last(target), ())) > 1:
            fused[target] = reading.packed[last(target)]
    facts = {
        "quantized": sorted(reading.quantized),
        "unquantized": sorted(reading.unquantized),
        "absorbed": sorted(reading.absorbed),
        "experts": experts,
        "fused": _by_last_name(fused),
        "unlisted": sorted(unlisted),
        "renames": reading.renames,
        "listed": reading.listed if reading.listed != reading.renames else None,
        "moves": _moves(reading, fused),
        "prefixes": _beginnings({name: reading.prefixes[name] for name in sorted(reading.quantized)}),
        "skipped": sorted(module for module, target in reading.loads.items() if not target),
        "drafter": reading.drafter,
        "place": reading.place,
        "generic": reading.generic,
    }
    return {key: value for key, value in facts.items() if value or (key == "listed" and value is not None)}


def is_expert(module: str, container: str) -> bool:
    """Whether a module on disk is one expert of the container, and not a stack of them."""
    return module.count("*") > container.count("*") and parent(module).endswith(".*")


def _position(items: list[str], item: str) -> int:
    return items.index(item) if item in items else len(items)


def _by_last_name(fused: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Call fused modules by their last name where all of that name have the same parts."""
    choices: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for target, parts in fused.items():
        choices[last(target)].add(tuple(parts))
    return {
        (last(target) if len(choices[last(target)]) == 1 else target): parts for target, parts in sorted(fused.items())
    }


def _moves(reading: Reading, fused: Mapping[str, list[str]]) -> dict[str, str]:
    """Return what is left to rename after the renames."""
    pairs: dict[str, str] = {}
    for module, target in sorted(reading.loads.items()):
        name = reading.new_names[module]
        if not target or name is None:
            continue
        if target in reading.experts and is_expert(name, target):
            pairs[parent(parent(name))] = target
        elif target in fused and all("." not in part for part in fused[target]):
            pairs[parent(name)] = parent(target)
        else:
            pairs[name] = target
    return _beginnings(pairs)


def _beginnings(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the shortest beginnings of names whose replacement, the longest first, turns each name into its pair."""
    beginnings: dict[str, str] = {}
    for source, target in pairs.items():
        if source == target:
            continue
        before, after = source.split("."), target.split(".")
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        if before and before.count("*") == after.count("*"):
            beginnings.setdefault(".".join(before), ".".join(after))
        else:
            beginnings[source] = target
    for source, target in pairs.items():
        if _replaced(source, beginnings) != target:
            beginnings[source] = target
    return dict(sorted(beginnings.items()))


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (beginning := ".".join(parts[:count])) in beginnings:
            return ".".join(filter(None, (beginnings[beginning], *parts[count:])))
    return name


def union(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for a class that several models of the zoo share."""
    result: dict[str, Any] = {}
    for facts in rows:
        for key, value in facts.items():
            if isinstance(value, dict):
                result[key] = {**result.get(key, {}), **value}
            elif isinstance(value, list):
                items = [*result.get(key, []), *(item for item in value if item not in result.get(key, []))]
                result[key] = items if key in ("renames", "listed") else sorted(items)
            else:
                result[key] = value
    if "unquantized" in result and "quantized" in result:
        result["quantized"] = [name for name in result["quantized"] if name not in result["unquantized"]]
    return result
