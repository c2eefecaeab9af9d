"""The fixtures of stages, for runs."""

from __future__ import annotations

from tests.stages.conftest import _alone, orchestra, project, quantmint, setting, with_vllm, write_gate, write_model

__all__ = ["_alone", "orchestra", "project", "quantmint", "setting", "with_vllm", "write_gate", "write_model"]
