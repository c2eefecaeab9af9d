"""Every scheme in every layout that vLLM's CPU build is said to load: it loads, and answers as the bytes mean.

The pairs are those that the table of hardware does not refuse on this CPU, so that none is forgotten, and none claimed
that does not answer. An FP8 cache is the attention's affair: it is proven in both layouts with one scheme, in one of
them by `test_published`, whose server reads what came from the Hub. Two schemes in one checkpoint are a layer-wise
configuration in Quark's layout and groups in the other: INT8 with attention in FP8 in both, by the libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.hardware import local_cpu_flags
from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.serving.served.cases import PUBLISHED, Case, loaded, make_case, mixed, with_fp8_cache
from tests.serving.served.proof import prove

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

FLAGS = local_cpu_flags() or frozenset()
CASES = (
    *loaded("cpu", cpu_flags=FLAGS),
    *with_fp8_cache("cpu", ["ptpc_fp8"], cpu_flags=FLAGS),
    *mixed("cpu", ["int8_w8a8"], cpu_flags=FLAGS),
)


@pytest.fixture
def make(warm_library: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, Path], Path]:
    """Quantize; an engine's library has been imported, and `test_a_run_with_the_real_library` starts both anew."""

    def made(case: Case, folder: Path) -> Path:
        with monkeypatch.context() as patch:
            if case.engine != "stream":
                # Quark compiles an extension with the tools beside the interpreter.
                patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
                patch.setattr(sys, "executable", str(warm_library(case.engine)))
            return make_case(case, folder)

    return made


@pytest.mark.parametrize("case", [case for case in CASES if case != PUBLISHED], ids=lambda case: case.name)
def test_it_answers_as_its_bytes_mean(
    case: Case, warm_vllm: VllmEnvironment, make: Callable[[Case, Path], Path], tmp_path: Path
) -> None:
    prove(case, tmp_path, warm_vllm, "cpu", make=make)
