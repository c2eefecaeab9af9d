"""The GPU that all tests of this folder need, and the vLLM that serves on it."""

from __future__ import annotations

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm


@pytest.fixture(scope="session")
def vllm() -> VllmEnvironment:
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("no CUDA GPU; an Instinct machine runs the shipped recipes instead")
    try:
        return find_vllm()
    except UserError as error:
        pytest.skip(f"no vLLM to serve with: {error.message}")
