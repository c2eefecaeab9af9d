"""The commands of Ray that a launch runs, and what they say of it: addresses of the head and of each machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from pipeline.errors import UserError
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.invocation import accelerator

_HINT = (
    "vLLM's image for ROCm brings Ray along; into an environment of your own it comes with `pip install ray`, the same"
    " version on every machine"
)


def ray_command(vllm: VllmEnvironment) -> list[str]:
    """The ``ray`` of vLLM's environment. UserError where it has none."""
    beside = vllm.executable.parent / "ray"
    if beside.is_file() and os.access(beside, os.X_OK):
        return [str(beside)]
    known = subprocess.run([str(vllm.python), "-c", "import ray"], check=False, capture_output=True)
    if known.returncode == 0:
        return [str(vllm.python), "-m", "ray.scripts.scripts"]
    raise UserError(f"the environment of {vllm.executable} has no Ray", hint=_HINT)


def start_argv(process: Process, ray: Sequence[str]) -> list[str]:
    """The plan's ``ray start`` as our child: in the foreground, without dashboard, its GPUs counted by the plan."""
    own = [f"--num-gpus={len(process.gpus)}", "--disable-usage-stats", "--block"]
    if process.role == "ray-head":
        own.append("--include-dashboard=false")
    given = {word.partition("=")[0] for word in process.argv}
    return [*ray, *process.argv[1:], *(word for word in own if word.partition("=")[0] not in given)]


def ray_environment(plan: LaunchPlan, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of `ray start`, which its workers inherit: on ROCm without a CUDA_VISIBLE_DEVICES of this shell.

    Ray gives each worker its accelerators in HIP_VISIBLE_DEVICES, and vLLM stops where the other says otherwise (vLLM
    0.33 vllm/platforms/rocm.py).
    """
    if plan.target and accelerator(plan).kind == "rocm":
        return {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
    return dict(env)


def head_address(process: Process) -> str:
    """HOST:PORT of the cluster that a process starts or joins."""
    values = _options(process.argv)
    return values.get("--address") or f"{own_address(process)}:{values.get('--port', '6379')}"


def own_address(process: Process) -> str:
    """The address of the process's machine."""
    own = _options(process.argv).get("--node-ip-address") or process.env.get("VLLM_HOST_IP")
    if own is None:
        raise UserError(f"the launch does not say the address of node {process.node}")
    return own


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Options with values, written with a blank or with an equals sign."""
    found = {}
    for word, following in zip(argv, (*argv[1:], "--"), strict=True):
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if sign or following.startswith("--") else following
    return found
