"""How well the calibration data reaches a mixture's experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


def sentences(starved: Mapping[str, int], floor: int, *, most: int = 8) -> tuple[str, ...]:
    """One sentence a layer about the experts that the router sent fewer than ``floor`` tokens, for people.

    ``starved`` has their tokens by name, ``LAYER.experts.NUMBER``.
    """
    by_layer: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for expert, tokens in starved.items():
        layer, _, number = expert.rpartition(".")
        by_layer[layer].append((int(number), tokens))
    found = []
    for layer, experts in by_layer.items():
        named = ", ".join(f"{number} ({tokens:,})" for number, tokens in sorted(experts)[:most])
        more = f" and {len(experts) - most} more" if len(experts) > most else ""
        found.append(f"{layer}: fewer than {floor:,} tokens were sent to expert {named}{more}")
    return tuple(found)
