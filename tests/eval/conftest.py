"""Two models with known scores, served on known machines, for the tests of the gate, its record, its report."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from eval.gate import Policy, judge
from eval.measurements import Measurements
from eval.report.model import LayerError, Report
from tests.eval.measured import digest, good_measurements


@pytest.fixture
def measurements() -> Measurements:
    """A good candidate: no loss beyond a point, a quarter faster."""
    return good_measurements()


@pytest.fixture
def policy() -> Policy:
    return Policy(margins={"tiny_facts": 0.01, "tiny_arithmetic": 0.04}, min_ratio=1.0, launches=4, hardware="mi300x")


@pytest.fixture
def make_report() -> Callable[[Measurements, Policy], Report]:
    def make(measurements: Measurements, policy: Policy) -> Report:
        kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        layers: list[LayerError] = [
            {
                "layer": layer,
                "kind": kind,
                "sqnr_db": 31.5 + 1.1 * math.sin(layer / 3 + i) - (4 * (layer == 1) * (i == 6)),
            }
            for layer in range(32)
            for i, kind in enumerate(kinds)
        ]
        servers = {"baseline": measurements.baseline, "candidate": measurements.candidate}
        return {
            "name": "llama8b-fp8kv",
            "model": "meta-llama/Llama-3.1-8B-Instruct @ 0e9e39f",
            "scheme": "ptpc_fp8, KV cache in FP8",
            "created": "2026-03-14T09:26:53Z",
            "notes": [
                "Served on a CPU: the throughput figures prove the path, they say nothing about Instinct kernels.",
                "One launch a side: the spread between launches is not known.",
            ],
            "gate": judge(measurements, policy).to_json(),
            "size": {
                "baseline_bytes": 16_060_522_496,
                "candidate_bytes": 9_083_392_000,
                "parts": [
                    {"name": "linear weights", "baseline_bytes": 13_958_643_712, "candidate_bytes": 6_979_321_856},
                    {"name": "embeddings, head", "baseline_bytes": 2_101_346_304, "candidate_bytes": 2_101_346_304},
                    {"name": "norms", "baseline_bytes": 532_480, "candidate_bytes": 532_480},
                    {"name": "scales", "baseline_bytes": 0, "candidate_bytes": 2_191_360},
                ],
            },
            "layers": layers,
            "stages": [
                {"name": name, "seconds": seconds, "cached": cached, "fingerprint": digest(name) * 4}
                for name, seconds, cached in (
                    ("source", 41.2, True), ("calibrate", 96.0, False), ("quantize", 38.5, False),
                    ("inspect", 6.1, False), ("serve", 71.0, False), ("evaluate", 412.7, False),
                    ("bench", 188.3, False), ("gate", 0.4, False),
                )
            ],
            "servers": [
                {
                    "side": side, "version": server.version, "device": server.device, "image": server.image,
                    "env": dict(server.env), "argv": list(server.argv),
                }
                for side, server in servers.items()
            ],
            "recipe": "name: llama8b-fp8kv\nmodel: meta-llama/Llama-3.1-8B-Instruct\nscheme: ptpc_fp8\nkv_cache: fp8\n"
            "note: <script>alert(1)</script>\n",
            "reproduce": ["quantmint run llama8b-fp8kv", "quantmint gate out/llama8b-fp8kv"],
            "versions": {"quantmint": "0.1.0", "vllm": "0.32.0", "lm-eval": "0.4.13"},
            "digests": {"recipe": "sha256:" + "12" * 32},
        }  # fmt: skip

    return make
