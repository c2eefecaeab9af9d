"""The content of a report, as the caller fills it; `report.json` is exactly this."""

from __future__ import annotations

from typing import Any, TypedDict


class SizePart(TypedDict):
    """Bytes of one part of the checkpoint, such as "linear weights", "scales", "embeddings"."""

    name: str
    baseline_bytes: int
    candidate_bytes: int


class Size(TypedDict):
    """Bytes of the weights on disk, in all and by part."""

    baseline_bytes: int
    candidate_bytes: int
    parts: list[SizePart]


class LayerError(TypedDict):
    """Error of one quantized linear: signal to quantization noise of its weight, in dB (higher is better).

    `kind` is the linear's role, such as `q_proj`, `layer` the number of its decoder layer.
    """

    layer: int
    kind: str
    sqnr_db: float


class Stage(TypedDict):
    """One stage of the run; `cached` stages were found in the store, `seconds` is then what they took originally."""

    name: str
    seconds: float
    cached: bool
    fingerprint: str


class LaunchPlan(TypedDict):
    """How one side was served."""

    side: str
    version: str
    device: str
    image: str | None
    env: dict[str, str]
    argv: list[str]


class Report(TypedDict):
    """All that a report shows.

    `gate` is `GateReport.to_json()`. `created` is an ISO 8601 time in UTC. `notes` are sentences that a reader must
    know before the figures, such as the hardware that they come from. `reproduce` are shell commands. `versions`
    maps a tool to its version, `digests` a name to a digest.
    """

    name: str
    model: str
    scheme: str
    created: str
    notes: list[str]
    gate: dict[str, Any]
    size: Size
    layers: list[LayerError]
    stages: list[Stage]
    servers: list[LaunchPlan]
    recipe: str
    reproduce: list[str]
    versions: dict[str, str]
    digests: dict[str, str]
