"""The launch plan, command line and variables of the reference runtime; imports nothing of the runtime itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quantmint.pipeline.serving.plan import LaunchPlan

# Part of fingerprints, and never executed: it keeps the module's old path, or everything would be measured again.
_COMMAND = ("python", "-mquantmint.pipeline.reference")
_ROOT = Path(__file__).parents[4]  # the folder to import `quantmint` from


def reference_plan(
    model: Path,
    *,
    served_model_name: str,
    max_model_len: int,
    kv_cache_dtype: str,
    trust_remote_code: bool = False,
    mx_scales: str = "even",
) -> LaunchPlan:
    """Return the plan of a checkpoint on the reference runtime; its device is chosen at the start."""
    return LaunchPlan(
        env={"TOKENIZERS_PARALLELISM": "false"},
        argv=(
            *_COMMAND,
            str(model),
            *("--served-model-name", served_model_name),
            *("--max-model-len", str(max_model_len)),
            *(() if kv_cache_dtype == "auto" else ("--kv-cache-dtype", kv_cache_dtype)),
            *(() if mx_scales == "even" else ("--mx-scales", mx_scales)),
            *(("--trust-remote-code",) if trust_remote_code else ()),
        ),
        served_model_name=served_model_name,
        tensor_parallel_size=1,
        reasons=(),
        profile="reference",
    )


def reference_command(plan: LaunchPlan, device: str) -> list[str]:
    """Return the command line of a `reference_plan`, without the socket; ``device`` is PyTorch's name, or "auto"."""
    # -P: a folder called `quantmint` in the current folder must not shadow ours.
    return [sys.executable, "-P", "-m", "quantmint.pipeline.serving.reference", *plan.argv[2:], "--device", device]


def shown_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a plan's command line as a person would run it: that of the reference runtime with its module's name."""
    if tuple(argv[:2]) != _COMMAND:
        return tuple(argv)
    return ("python", "-m", "quantmint.pipeline.serving.reference", *argv[2:])


def reference_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables of a `reference_plan`, with PYTHONPATH for importing `quantmint`."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**plan.env, "PYTHONPATH": path, "TQDM_DISABLE": "1"}
