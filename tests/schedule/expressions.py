"""Cron expressions of every shape, the same in each run."""

from __future__ import annotations

import random
from collections.abc import Iterator

_BOUNDS = ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))
ODD = (
    "0 3 * * 6",
    "0 3 1 * 6",
    "*/15 9-17 * * 1-5",
    "30 2 29 2 *",
    "0 0 31 * *",
    "5/20 */6 * * *",
    "0 12 * * 5-7",
    "0 12 */2 * 1",
    "0 12 1-31 * 1",
    "59 23 31 12 sun",
    "0 4 1,15 JAN-MAR,oct mon,wed-fri",
)
CRONSIM_ONLY = (
    "0 0 L * *",
    "0 1 LW * *",
    "0 2 * * 5L",
    "15 3 * * 1#1,3#2",
    "0 4 1,L * *",
    "0 5 */2 * 1#1",
    "0 6 L * */2",
)


def expressions(count: int, seed: int = 0, *, own: bool = True) -> tuple[str, ...]:
    """Odd ones, then `count` at random; with `own` those that only cronsim knows, too."""
    source = random.Random(seed)  # noqa: S311 - nothing secret
    drawn = (" ".join(_field(source, *bounds) for bounds in _BOUNDS) for _ in range(count))
    return tuple(dict.fromkeys((*ODD, *(CRONSIM_ONLY if own else ()), *drawn)))


def _field(source: random.Random, lowest: int, highest: int) -> str:
    return source.choice(tuple(_shapes(source, lowest, highest)))


def _shapes(source: random.Random, lowest: int, highest: int) -> Iterator[str]:
    low, high = sorted(source.sample(range(lowest, highest + 1), 2))
    step = source.randint(2, max(2, (highest - lowest) // 2))
    yield from ("*", "*", "*", f"*/{step}", str(low), str(high), f"{low}-{high}", f"{low}-{high}/{step}")
    yield ",".join(map(str, sorted(source.sample(range(lowest, highest + 1), 3))))
    yield f"{low},{high}-{highest}"
