"""The fixtures of what is warm: one for all files and all test processes that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from tests.warm.shared import for_all_workers, shared_python, shared_vllm


@pytest.fixture(scope="session")
def _kept_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEnvironment]:
    try:
        found = find_vllm()
    except UserError as error:
        pytest.skip(f"no vLLM to serve with: {error.message}")
    if "cpu" not in found.version:  # others look for a GPU when they are imported, and none can be used in a fork
        yield found
        return
    with shared_vllm(for_all_workers(tmp_path_factory, "warm-vllm"), found) as warm:
        yield warm


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a server finds what PyTorch compiled for others, which takes a core some fifteen seconds."""
    folder = for_all_workers(tmp_path_factory, "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def warm_vllm(_kept_vllm: VllmEnvironment, kernels: Path) -> Iterator[VllmEnvironment]:
    """A vLLM that was imported already; `test_serve` and others start it as users do."""
    with pytest.MonkeyPatch.context() as patch:
        # Where our commands are told to find our modules. Other variables would be another process to fork from.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield _kept_vllm


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python whose programs, lm-eval's and the reference runtime's among them, are forks with one thread each."""
    with shared_python(for_all_workers(tmp_path_factory, "warm-python")) as python:
        yield python
