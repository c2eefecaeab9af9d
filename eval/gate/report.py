"""The verdict with all that led to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.accuracy import Accuracy
from eval.canary import Canary
from eval.errors import MeasurementError
from eval.gate.control import Control
from eval.gate.finding import Finding, Kind
from eval.gate.headlines import Headline
from eval.gate.policy import Policy
from eval.servers import UNKNOWN
from eval.statistics.sequential import Look
from eval.throughput import Throughput
from eval.verdict import Verdict


@dataclass(frozen=True, slots=True)
class GateReport:
    """What a reader is told first: the verdict, on which runtime and hardware, and every finding.

    `runtime` and `hardware` are part of the verdict: a figure belongs to what it was measured on. `hardware` is a name
    of the table of targets, `device` what the accelerator calls itself. `looks` maps a task to the looks up to the one
    that decided (none where it is shown only), `control` to how often the baseline disagrees with itself on it.
    """

    artefact: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    accuracy: tuple[Accuracy, ...]
    throughput: tuple[Throughput, ...]
    policy: Policy
    looks: Mapping[str, tuple[Look, ...]] = field(default_factory=dict)
    control: Mapping[str, Control] = field(default_factory=dict)
    canary: Canary | None = None
    headlines: tuple[Headline, ...] = ()
    runtime: str = "vllm"
    hardware: str = UNKNOWN
    device: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is what it is: the reasons of the findings that have it."""
        return tuple(finding.reason for finding in self.findings if finding.verdict is self.verdict)

    def verdict_of(self, kind: Kind, subject: str | None = None) -> Verdict | None:
        """Verdict of one kind of check, or of one subject in it; None where nothing of it was judged."""
        found = [f.verdict for f in self.findings if f.kind == kind and subject in (None, f.subject)]
        return Verdict.combine(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {
            "artefact": self.artefact,
            "verdict": self.verdict.value,
            "runtime": self.runtime,
            "hardware": self.hardware,
            "device": self.device,
            "findings": [finding.to_json() for finding in self.findings],
            "accuracy": [result.to_json() for result in self.accuracy],
            "looks": {task: [look.to_json() for look in looks] for task, looks in self.looks.items()},
            "control": {task: control.to_json() for task, control in self.control.items()},
            "canary": None if self.canary is None else self.canary.to_json(),
            "throughput": [cell.to_json() for cell in self.throughput],
            "headlines": [headline.to_json() for headline in self.headlines],
            "policy": self.policy.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateReport:
        """Read back what `to_json` wrote; `MeasurementError` for anything else."""
        try:
            return cls(
                artefact=str(data["artefact"]),
                verdict=Verdict(data["verdict"]),
                findings=tuple(map(Finding.from_json, data["findings"])),
                accuracy=tuple(map(Accuracy.from_json, data["accuracy"])),
                throughput=tuple(map(Throughput.from_json, data["throughput"])),
                policy=Policy.from_json(data["policy"]),
                looks={task: tuple(map(Look.from_json, looks)) for task, looks in data["looks"].items()},
                control={task: Control.from_json(control) for task, control in data["control"].items()},
                canary=None if data["canary"] is None else Canary.from_json(data["canary"]),
                headlines=tuple(map(Headline.from_json, data["headlines"])),
                runtime=str(data["runtime"]),
                hardware=str(data["hardware"]),
                device=str(data["device"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"not a report of the gate: {error!r}") from error
