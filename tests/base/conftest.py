"""The project fixture of the stages' tests, for the tests of progress."""

from __future__ import annotations

from tests.stages.conftest import orchestra, project, quantmint, setting, with_vllm, write_model

__all__ = ["orchestra", "project", "quantmint", "setting", "with_vllm", "write_model"]
