"""What an inspection found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

INSPECTION = "inspection.json"
"""The file that an inspection is kept in, in the store and in the evidence of a release."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction; ``rule`` is its short name, ``where`` a tensor, a module or a file."""

    rule: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """The rounding error of one quantized weight against its 16-bit source.

    ``sqnr_db`` is 10 log10(sum w^2 / sum (w - q)^2), dB.
    """

    module: str
    scheme: str
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that was looked at. ``bytes_by_part`` splits the weights' bytes by what they are."""

    checkpoint_format: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerError, ...]
    bytes_by_part: Mapping[str, int]
    quantized_modules: int
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    compared_with_source: bool = False

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts anything."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """A plain, stable form; JSON has no NaN or infinity, so those are null."""
        plain: dict[str, Any] = _finite({"verdict": "PASS" if self.passed else "FAIL", **asdict(self)})
        return plain

    def summary(self, limit: int = 5) -> str:
        """A few lines for a person: the first findings of each rule."""
        if self.passed:
            worst = min(self.layers, key=lambda layer: layer.sqnr_db, default=None)
            error = "" if worst is None else f"; least SQNR {worst.sqnr_db:.1f} dB at {worst.module}"
            scales = f", {len(self.kv_scales)} KV scales" if self.kv_scales else ""
            return f"{self.quantized_modules} quantized modules{scales}, nothing missing{error}"
        return "\n".join(_by_rule(self.findings, limit))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_rule(findings: Sequence[Finding], limit: int) -> list[str]:
    lines: list[str] = []
    for rule in dict.fromkeys(finding.rule for finding in findings):
        same = [finding for finding in findings if finding.rule == rule]
        lines += [f"{rule}: {finding.where}: {finding.message}" for finding in same[:limit]]
        if len(same) > limit:
            lines.append(f"{rule}: … {len(same) - limit} more")
    return lines
