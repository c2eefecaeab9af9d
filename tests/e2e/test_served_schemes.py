"""Every scheme in every layout that vLLM's CPU build is said to load: it loads, and answers as the bytes mean.

The pairs are those that the table of hardware does not refuse on this CPU, so that none is forgotten, and none claimed
that does not answer. An FP8 cache is the attention's affair: it is proven in both layouts with one scheme, in one of
them by `test_published`, whose server reads what came from the Hub.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.hardware import local_cpu_flags
from tests.served.cases import PUBLISHED, Case, loaded, with_fp8_cache
from tests.served.proof import prove

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

FLAGS = local_cpu_flags() or frozenset()
CASES = (*loaded("cpu", cpu_flags=FLAGS), *with_fp8_cache("cpu", ["ptpc_fp8"], cpu_flags=FLAGS))


@pytest.mark.parametrize("case", [case for case in CASES if case != PUBLISHED], ids=lambda case: case.name)
def test_it_answers_as_its_bytes_mean(case: Case, warm_vllm: VllmEnvironment, tmp_path: Path) -> None:
    prove(case, tmp_path, warm_vllm, "cpu")
