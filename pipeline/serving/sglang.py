"""The launch of a checkpoint on SGLang: what a server must be started with to be measured; quantmint does not start it.

>>> plan = sglang_plan(Path("/m"), served_model_name="m", max_model_len=4096, kv_cache_dtype="fp8")
>>> " ".join(shown_command(plan.argv)[3:])
'--model-path /m --served-model-name m --context-length 4096 --kv-cache-dtype fp8_e4m3'
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantmint.pipeline.serving.plan import LaunchPlan

_MODULE = "sglang.launch_server"


def sglang_plan(
    model: Path, *, served_model_name: str, max_model_len: int, kv_cache_dtype: str, trust_remote_code: bool = False
) -> LaunchPlan:
    """Return the plan of a checkpoint on SGLang. ``kv_cache_dtype`` is the recipe's, "auto" or "fp8" (E4M3)."""
    return LaunchPlan(
        env={},
        argv=(
            *(_MODULE, "--model-path", str(model)),
            *("--served-model-name", served_model_name),
            *("--context-length", str(max_model_len)),
            *(() if kv_cache_dtype == "auto" else ("--kv-cache-dtype", "fp8_e4m3")),
            *(("--trust-remote-code",) if trust_remote_code else ()),
        ),
        served_model_name=served_model_name,
        tensor_parallel_size=1,
        reasons=(),
        profile="sglang",
    )


def shown_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a plan as a person runs it; that of another runtime as it is."""
    return ("python3", "-m", *argv) if argv and argv[0] == _MODULE else tuple(argv)
