"""What our engine makes on a GPU, a real vLLM loads there, and answers as the bytes mean; some of it is judged as well.

On an NVIDIA GPU this proves the formats and the gate, not AMD's kernels. `tests/serving/served/proof.py` says how to
keep the figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.base.schemes import WRITES, table
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.store.tree import Store
from tests.serving.served.cases import SOME_LAYERS, Case, loaded, mixed, with_fp8_cache
from tests.serving.served.proof import prove

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

# What needs no library, in each layout that has it; an FP8 cache for the schemes that recipes ship with one.
CASES = (
    *(case for case in loaded("cuda") if "stream" in table()[case.scheme].makers(case.checkpoint_format)),
    *with_fp8_cache("cuda", ["ptpc_fp8", "fp8"]),
    *(Case("mxfp4", checkpoint_format, "fp8", other="fp8") for checkpoint_format in WRITES["stream"]),
    # What `scheme: auto` makes.
    *mixed("cuda", ["mxfp4", "mxfp4_fp8"]),
    *(replace(case, where=SOME_LAYERS) for case in mixed("cuda", ["mxfp4"])),
)

RECIPE = """
name: {name}
extends: tiny-ptpc-fp8kv
quantization: {{scheme: {scheme}, kv_cache: {kv_cache}, format: {format}}}
target: {{hardware: h100, gpus: 1}}
gate: {{throughput: {{min_ratio: 0.01}}}}
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_answers_as_its_bytes_mean(case: Case, vllm: VllmEnvironment, tmp_path: Path) -> None:
    prove(case, tmp_path, vllm, "h100")


# The embedded model tells eight bits from four: MXFP4 by plain rounding loses about three points, the margin is one.
@pytest.mark.parametrize(
    ("scheme", "kv_cache", "checkpoint_format", "expected"),
    [("fp8", "fp8", "compressed-tensors", Verdict.PASS), ("mxfp4", "auto", "quark", Verdict.FAIL)],
)
def test_it_is_served_and_judged(
    vllm: VllmEnvironment,
    scheme: str,
    kv_cache: str,
    checkpoint_format: str,
    expected: Verdict,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # One store for both: they share the baseline.
    home = tmp_path_factory.getbasetemp() / "judged"
    home.mkdir(exist_ok=True)
    outcome = run(home, scheme, kv_cache, checkpoint_format)
    gate = outcome.entry("gate")
    assert gate is not None
    print(scheme, kv_cache, checkpoint_format, gate.record.result["reasons"])  # noqa: T201 - the figures are the point
    for key in ("serve-candidate", "evaluate-candidate", "bench"):
        entry = outcome.entry(key)
        print("   ", key, entry.record.result["summary"] if entry else None)  # noqa: T201
    assert outcome.verdict is expected


def run(home: Path, scheme: str, kv_cache: str, checkpoint_format: str) -> RunOutcome:
    name = f"gpu-{scheme}-{kv_cache}-{checkpoint_format}".replace("_", "-")
    path = home / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, scheme=scheme, kv_cache=kv_cache, format=checkpoint_format))
    setting = open_setting(str(path), store=Store(home / "store"), to_run=True)
    # The page is no part of what a GPU proves, and needs libraries of its own.
    plan = [planned for planned in build_plan(setting) if planned.key != "report" and not planned.stage.releases]
    return run_plan(plan, setting, PlainReporter())
