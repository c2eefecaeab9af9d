"""Every scheme and layout through the whole pipeline on a GPU: what the engine writes there, a real vLLM loads.

On an NVIDIA GPU this proves the formats and the gate, not AMD's kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.verdict import Verdict
from pipeline.errors import UserError
from pipeline.planning import build_plan
from pipeline.progress import PlainReporter
from pipeline.runner import Outcome, run_plan
from pipeline.serving.environment import find_vllm
from pipeline.session import open_setting
from pipeline.store.tree import Store

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

# The embedded model tells eight bits from four: MXFP4 by plain rounding loses about three points, the margin is one.
CASES = [
    ("ptpc_fp8", "fp8", "compressed-tensors", Verdict.PASS),
    ("ptpc_fp8", "fp8", "quark", Verdict.PASS),
    ("fp8", "fp8", "quark", Verdict.PASS),
    ("fp8", "fp8", "compressed-tensors", Verdict.PASS),
    ("mxfp4", "auto", "quark", Verdict.FAIL),
    ("mxfp4", "auto", "compressed-tensors", Verdict.FAIL),
    ("mxfp4", "fp8", "quark", Verdict.FAIL),
    ("fp8_block", "auto", "compressed-tensors", Verdict.PASS),
    ("mxfp4_weight_only", "auto", "compressed-tensors", Verdict.FAIL),
]

RECIPE = """
name: {name}
extends: tiny-ptpc-fp8kv
quantization: {{scheme: {scheme}, kv_cache: {kv_cache}, format: {format}}}
target: {{hardware: cuda, gpus: 1}}
gate: {{throughput: {{min_ratio: 0.01}}}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("no CUDA GPU; an Instinct machine runs the shipped recipes instead")
    try:
        find_vllm()
    except UserError as error:
        pytest.skip(f"no vLLM to serve with: {error.message}")
    return tmp_path_factory.mktemp("gpu")


def run(home: Path, scheme: str, kv_cache: str, checkpoint_format: str) -> Outcome:
    name = f"gpu-{scheme}-{kv_cache}-{checkpoint_format}".replace("_", "-")
    path = home / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, scheme=scheme, kv_cache=kv_cache, format=checkpoint_format))
    setting = open_setting(str(path), store=Store(home / "store"), to_run=True)
    plan = [planned for planned in build_plan(setting) if planned.key != "publish"]
    return run_plan(plan, setting, PlainReporter())


@pytest.mark.parametrize(("scheme", "kv_cache", "checkpoint_format", "expected"), CASES)
def test_it_is_served_and_judged(
    home: Path, scheme: str, kv_cache: str, checkpoint_format: str, expected: Verdict
) -> None:
    outcome = run(home, scheme, kv_cache, checkpoint_format)
    gate = outcome.entry("gate")
    assert gate is not None
    print(scheme, kv_cache, checkpoint_format, gate.record.result["reasons"])  # noqa: T201 - the figures are the point
    for key in ("serve-candidate", "evaluate-candidate", "bench-candidate"):
        entry = outcome.entry(key)
        print("   ", key, entry.record.result["summary"] if entry else None)  # noqa: T201
    assert outcome.verdict is expected
