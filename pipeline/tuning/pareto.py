"""Which measurements nothing beats.

>>> frontier([(100.0, 5.0), (90.0, 6.0), (80.0, 4.0)])
[2, 0]
"""

from __future__ import annotations

from collections.abc import Sequence


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether ``one`` (more is better, less is better) is nowhere worse than ``other`` and somewhere better."""
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (throughput, latency) that no other dominates, from the least latency to the most.

    Of equal points the first is named. O(n log n): by rising latency, what raises the best throughput so far.
    """
    by_latency = sorted(range(len(points)), key=lambda index: (points[index][1], -points[index][0], index))
    kept: list[int] = []
    for index in by_latency:
        if not kept or points[index][0] > points[kept[-1]][0]:
            kept.append(index)
    return kept
