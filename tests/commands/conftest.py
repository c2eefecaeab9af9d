"""The project of the stages' tests, for what is typed in it."""

from __future__ import annotations

from tests.stages.conftest import _alone, orchestra, project, quantmint, setting, with_vllm, write_gate, write_model

__all__ = ["_alone", "orchestra", "project", "quantmint", "setting", "with_vllm", "write_gate", "write_model"]
