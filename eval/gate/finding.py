"""One check of the gate: what was checked, how it ended, why in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eval.errors import MeasurementError
from eval.verdict import Verdict

Kind = Literal["validity", "accuracy", "canary", "throughput", "structure"]
ANOMALOUS = "ANOMALOUS"
"""Label of a gain that quantization cannot explain."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is a task, a cell, a side of the measurement; `label` names a special case of the verdict."""

    kind: Kind
    subject: str
    verdict: Verdict
    reason: str
    label: str | None = None

    @classmethod
    def invalid(cls, subject: str, fault: str) -> Finding:
        """Why a measurement must not be judged."""
        return cls("validity", subject, Verdict.INVALID, sentence(fault))

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Read back what `to_json` wrote; `MeasurementError` for anything else."""
        try:
            return cls(**{**data, "verdict": Verdict(data["verdict"])})
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"not a finding of the gate: {error!r}") from error


def sentence(text: str) -> str:
    """Text with a full stop, as reasons are printed one after the other."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
