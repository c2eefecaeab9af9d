"""A serving environment that a fake machine can be asked about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.serving.host.context import HostFinding


@pytest.fixture
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `vllm` command of an environment; the machine's `run` answers for its interpreter."""
    folder = tmp_path_factory.mktemp("serving") / "bin"
    folder.mkdir()
    for name in ("vllm", "python"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder / "vllm"


@pytest.fixture
def finding(vllm: Path) -> Callable[..., HostFinding]:
    """Look at a machine for one check: ``finding("iommu", machine, target="mi300x:8")``."""
    from quantmint.pipeline.serving.host.checks import checks
    from quantmint.pipeline.serving.host.context import gather_context
    from quantmint.pipeline.serving.planning.target import parse_target

    def one(name: str, machine: Host, *, target: str | None = None, **given: object) -> HostFinding:
        parsed = None if target is None else parse_target(target)
        return checks()[name].run(gather_context(machine, target=parsed, vllm=given.pop("vllm", vllm), **given))

    return one
