"""What a release of a model of the Hub was made from, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish.manifest import (
    DatasetRecord,
    HardwareRecord,
    Manifest,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.release import CARD, MANIFEST, PROVENANCE, SIGNATURE
from quantmint.pipeline.store.files import File
from quantmint.pipeline.store.toolchain import Distribution, Environment

A, B, COMMIT, OTHER = "a" * 64, "b" * 64, "c" * 40, "d" * 40
STARTED, JUDGED, REPORTED = "2026-11-20T23:59:59.000Z", "2026-11-21T12:00:04.445Z", "2026-11-21T12:00:06.000Z"
FILES = {
    name: File(Path("nowhere"), len(name), f"{number:064x}")
    for number, name in enumerate(
        ("config.json", "model-00001.safetensors", CARD, MANIFEST, SIGNATURE, PROVENANCE, "quantmint/gate.json")
    )
}
CHECKPOINT = {name: FILES[name] for name in ("config.json", "model-00001.safetensors")}


def made(key: str, started: str, finished: str, **tools: str) -> StageRecord:
    payload: dict[str, Any] = {"stage": key, "version": 2, "inputs": {}, "settings": {}, "tools": tools}
    return StageRecord(fingerprint(payload), 2, started, finished, tools, payload)


MANIFEST_OF_LLAMA = Manifest(
    name="llama-ptpc",
    title="Llama in FP8",
    created=JUDGED,
    verdict="PASS",
    recipe_fingerprint=B,
    files={},
    quantmint="0.1.0",
    recipe={"name": "llama-ptpc", "gate": {"accuracy": {"margin": 0.01}}, "calibration": None},
    artefact=A,
    base=SourceRecord("org/llama", COMMIT, None, {"config.json": A, "model.safetensors": B}),
    stages={
        "quantize": made("quantize", STARTED, STARTED, torch="2.13.0+rocm7.0", ninja="absent"),
        "serve-candidate": made("serve", STARTED, JUDGED, vllm="0.32.0", torch="2.12.0"),
        "gate": made("gate", JUDGED, JUDGED),
        "report": made("report", JUDGED, REPORTED, Jinja2="3.1.6"),
    },
    datasets=(
        DatasetRecord("calibration", "org/chat", COMMIT, None),
        DatasetRecord("evaluation", "tiny_facts", None, B),
        DatasetRecord("evaluation", "openai/gsm8k", f"{COMMIT}, {OTHER}", None),
        DatasetRecord("evaluation", "org/unknown", None, None),
    ),
    tools={"Jinja2": "3.1.6", "torch": "2.12.0, 2.13.0+rocm7.0", "vllm": "0.32.0"},
    serving=ServingRecord("vllm 0.32.0", f"rocm/vllm@sha256:{B}"),
    hardware=HardwareRecord("8 x AMD Instinct MI300X", "AMD Instinct MI300X", "mi300x"),
)
ENVIRONMENTS = {
    "quantize": Environment(
        "3.11.9",
        {
            "torch": Distribution("2.13.0+rocm7.0", "BSD-3-Clause"),
            "numpy": Distribution("2.3.0", "BSD License"),
            "certifi": Distribution("2026.1", None),
        },
    ),
    "serve-candidate": Environment(
        "3.12.1",
        {
            "torch": Distribution("2.12.0", "BSD-3-Clause"),
            "numpy": Distribution("2.3.0", None),
            "aiohttp": Distribution("3.14", "Apache-2.0 AND MIT"),
        },
    ),
}
"""Two environments that share a version of numpy and differ in torch; two stages that only named their tools."""
