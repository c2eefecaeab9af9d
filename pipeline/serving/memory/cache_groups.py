"""How vLLM lays keys, values and states out in its cache, and how many tokens that is.

Every layer has pages; a page holds a block of tokens, or one state. vLLM wants all pages equally large, puts layers of
one kind into groups of equally many layers, and gives a request blocks of each group (vLLM 0.32
vllm/v1/core/kv_cache_utils.py and v1/kv_cache_interface.py; the same in 0.26).

    >>> cache = cache_groups(layers, block_size=16)
    >>> cache.blocks(free_bytes) / cache.blocks_of_request(8192, 16384) * 8192     # "GPU KV cache size: N tokens"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer: ``nbytes`` of a token, or of a whole state; ``extra`` of a second cache that the layer has a token."""

    layer: int
    kind: Literal["full", "sliding", "state"]
    nbytes: int
    window: int = 0
    extra: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table; ``block`` is tokens of a block, 0 for states."""

    kind: Literal["full", "sliding", "state"]
    layers: tuple[int, ...]
    block: int
    window: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """``page`` is the bytes of one layer's page, the same in all groups."""

    groups: tuple[Group, ...]
    page: int

    def block_bytes(self, layers: range) -> int:
        """Bytes of one block in a pipeline stage with these layers: the widest group's."""
        return self.page * max((sum(n in layers for n in group.layers) for group in self.groups), default=0)

    def blocks_of_request(self, tokens: int, in_flight: int, *, states: int = 1) -> int:
        """Blocks that a request of so many tokens takes at most.

        ``in_flight`` tokens may be scheduled and not yet settled: a window keeps their blocks so long. ``states`` is
        how many states a request has; prefix caching needs a second one.
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += states
            elif group.kind == "sliding":
                # One more, because a window need not start where a block does.
                total += math.ceil(min(group.window - 1 + in_flight, tokens) / group.block) + 1
            else:
                total += math.ceil(tokens / group.block)
        return total


def cache_groups(layers: Sequence[LayerCache], *, block_size: int) -> CacheGroups:
    """Group the layers of a whole model. Without layers there are no groups."""
    attending = [cache for cache in layers if cache.kind != "state"]
    states = [cache for cache in layers if cache.kind == "state"]
    largest = max((cache.nbytes for cache in attending if cache.kind == "full"), default=0)
    largest = largest or max((cache.nbytes for cache in attending), default=0)
    if states and largest:
        # A block of attention must be as large as a state; it grows in steps of the block size.
        block_size *= math.ceil(max(cache.nbytes for cache in states) / (block_size * largest))
    page = max(block_size * largest, max((cache.nbytes for cache in states), default=0))
    if {cache.kind for cache in layers} == {"full"}:
        # All of one kind, of whatever size, are one group: its pages lie side by side.
        mean = sum(cache.nbytes + cache.extra for cache in attending) / len(attending)
        return CacheGroups(
            (Group("full", tuple(cache.layer for cache in attending), block_size, 0),), round(mean * block_size)
        )
    buckets: dict[tuple[Literal["full", "sliding", "state"], int, int], list[int]] = {}
    for cache in layers:
        block = 0 if cache.kind == "state" else page // cache.nbytes
        buckets.setdefault((cache.kind, cache.window, block), []).append(cache.layer)
    fewest, most = min(map(len, buckets.values()), default=0), max(map(len, buckets.values()), default=0)
    # vLLM's heuristic against padding where two kinds have nearly as many layers.
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for (kind, window, block), numbers in buckets.items():
        count = math.ceil(len(numbers) / size)
        groups += [Group(kind, tuple(numbers[start::count]), block, window) for start in range(count)]
    return CacheGroups(tuple(groups), page)
