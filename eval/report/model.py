"""The content of a report, as the caller fills it; `report.json` is exactly this."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

PAGE, DATA, CARD, JUNIT = "report.html", "report.json", "report.md", "junit.xml"
"""The files of a report: for people, for programs, for a model card, for a CI system."""

Direction = Literal["lost", "gained"]


class SizePart(TypedDict):
    """Bytes of one part of the checkpoint, such as "linear weights", "scales", "embeddings and head"."""

    name: str
    baseline_bytes: int
    candidate_bytes: int


class Size(TypedDict):
    """Bytes of the weights on disk, in all and by part."""

    baseline_bytes: int
    candidate_bytes: int
    parts: list[SizePart]


class ShownLayerError(TypedDict):
    """Error of one quantized linear: signal to quantization noise of its weight, in dB (higher is better).

    `kind` is the linear's role, such as `q_proj`, `layer` the number of its decoder layer, None outside the layers.
    Experts of one layer are one entry: `modules` counts them, `sqnr_db` is that of the worst.
    """

    layer: int | None
    kind: str
    sqnr_db: float
    modules: int


class KvScale(TypedDict):
    """The static scale of a layer's K or V cache (`which`): the least and the greatest where each head has one."""

    layer: int
    which: str
    low: float
    high: float


class Flip(TypedDict):
    """One item whose score changed: the end of its prompt, what was right, what each side said. "" where unknown."""

    task: str
    doc_id: int
    direction: Direction
    scores: tuple[float, float]
    prompt: str
    target: str
    baseline: str
    candidate: str


class TaskFlips(TypedDict):
    """All items of a task of the suite whose score changed."""

    task: str
    flips: list[Flip]


class ShownStage(TypedDict):
    """One stage of the run. `started` is an ISO 8601 time in UTC; `cached` stages were made before this run began."""

    name: str
    started: str
    seconds: float
    cached: bool
    fingerprint: str


class ServedSide(TypedDict):
    """The server of one side: runtime, machine and command."""

    side: str
    runtime: str
    version: str
    hardware: str
    device: str
    image: str | None
    env: dict[str, str]
    argv: list[str]


class Report(TypedDict):
    """All that a report shows.

    `gate` is `GateReport.to_json()`, `launches` are `Launch.to_json()`. `created` is an ISO 8601 time in UTC. `notes`
    are sentences that a reader must know before the figures, such as the hardware that they come from. `stopped` names
    the stage that ended the run early ("canary"). `kv_tokens` maps a side to the tokens that its KV cache holds, where
    its server said so. `prompts` maps the name of a canary's prompt to its text. `reproduce` are shell commands.
    `versions` maps a tool to its version, `digests` a name to a digest.
    """

    name: str
    model: str
    scheme: str
    created: str
    notes: list[str]
    stopped: str | None
    gate: dict[str, Any]
    size: Size
    kv_tokens: dict[str, int]
    layers: list[ShownLayerError]
    kv_scales: list[KvScale]
    flips: list[TaskFlips]
    prompts: dict[str, str]
    launches: list[dict[str, Any]]
    stages: list[ShownStage]
    servers: list[ServedSide]
    recipe: str
    reproduce: list[str]
    versions: dict[str, str]
    digests: dict[str, str]
