"""What the guides say of quantization, beside what was measured: rows to look at, never a verdict.

    >>> claims(weights="e4m3", kv_cache="fp8")
    {'memory_fp8': 2.0, 'kv_tokens_fp8': 2.0, 'throughput': 1.6}

The sentences are data, in `eval/headlines.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from eval.gate.report import Headline
from eval.throughput import Throughput

if TYPE_CHECKING:
    from eval.bench import Launch, Side
    from eval.measurements import Measurements


def claims(*, weights: str, kv_cache: str) -> dict[str, float]:
    """What the guides promise of a checkpoint: factors by name.

    `weights` is the element type of most weights ("e4m3", "e2m1"), `kv_cache` is "fp8" or "auto".
    """
    facts = {"weights": weights, "kv_cache": kv_cache}
    return {
        name: float(row["promised"])
        for name, row in _table().items()
        if all(facts[field] == value for field, value in row["when"].items())
    }


def measure(measurements: Measurements, throughput: Sequence[Throughput]) -> Iterator[Headline]:
    """The claims of a candidate beside what was measured. A claim that the table no longer has is left out."""
    for name, promised in measurements.claims.items():
        row = _table().get(name)
        if row is None:
            continue
        measured = _measured(row["measured"], measurements, throughput)
        yield Headline(
            name=name,
            title=row["title"],
            promised=promised,
            measured=measured,
            unit=row["unit"],
            kept=None if measured is None else round(measured, 1) >= promised,
            source=row["source"],
            upto=bool(row.get("upto", False)),
        )


def _measured(what: str, measurements: Measurements, throughput: Sequence[Throughput]) -> float | None:
    match what:
        case "memory":
            before, after = measurements.weights
            return before / after if before and after else None
        case "kv_tokens":
            room = [_kv_tokens(measurements.launches, side) for side in ("baseline", "candidate")]
            return room[1] / room[0] if room[0] and room[1] else None
        case "throughput":
            return max((cell.ratio for cell in throughput), default=None)
    raise ValueError(f"eval/headlines.yaml: nothing measures {what!r}")


def _kv_tokens(launches: Sequence[Launch], side: Side) -> float | None:
    found = [launch.kv_tokens for launch in launches if launch.side == side and launch.kv_tokens is not None]
    return median(found) if found else None


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("eval").joinpath("headlines.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = yaml.safe_load(text)["headlines"]
    return rows
