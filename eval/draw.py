"""Which items of a task are asked, in which order, and where the looks at them end.

    >>> [len(look) for look in draw({"facts": [""] * 1000}, looks=4, seed=0)]
    [250, 250, 250, 250]

The order is that of a SHA-256 of the seed and the item, so it is the same on every machine and on both sides, and a
look is a random sample of the task. A limit takes the first items of that order: never the first of the file, where a
subject or a difficulty may come first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from eval.statistics.sequential import plan_looks

Item = tuple[str, int]
"""Leaf task and number of the document in it."""


def draw(
    documents: Mapping[str, Sequence[str]], *, looks: int, seed: int, limit: int | None = None
) -> tuple[tuple[Item, ...], ...]:
    """The items of each look; `documents` has the cluster of each document ("": none) by leaf task.

    Items that share a cluster stand together and are never parted by a look, whose ends move back for them: what two
    looks have learnt is independent only so. There are fewer looks where a look would be small (`plan_looks`) or a
    cluster spans one. At most `limit` items are drawn. `ValueError` without documents.
    """
    cluster = {(leaf, number): name for leaf, names in documents.items() for number, name in enumerate(names)}
    order = sorted(cluster, key=lambda item: (_place(seed, item, cluster[item]), item))[:limit]
    found: list[tuple[Item, ...]] = []
    start = 0
    for end in plan_looks(len(order), looks):
        while 0 < end < len(order) and cluster[order[end]] and cluster[order[end]] == cluster[order[end - 1]]:
            end += 1
        if end > start:
            found.append(tuple(sorted(order[start:end])))
            start = end
    return tuple(found)


def by_leaf(items: Sequence[Item]) -> dict[str, list[int]]:
    """Ascending numbers of documents by leaf task, as lm-eval wants them."""
    found: dict[str, list[int]] = {}
    for leaf, number in sorted(items):
        found.setdefault(leaf, []).append(number)
    return found


def some(items: Sequence[Item], count: int, seed: int) -> tuple[Item, ...]:
    """At most `count` of the items, drawn by the seed; the same whatever order they come in."""
    return tuple(sorted(sorted(items, key=lambda item: (_place(seed, item, ""), item))[:count]))


def _place(seed: int, item: Item, cluster: str) -> bytes:
    name = f"passage {cluster}" if cluster else f"item {item[1]} of {item[0]}"
    return hashlib.sha256(f"{seed}: {name}".encode()).digest()
